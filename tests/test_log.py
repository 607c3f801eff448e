"""Tests of the stderr log handler."""

import logging

from rlctl.log import logging_to_stderr

LOG = logging.getLogger("rlctl.some.module")


def test_records_are_printed_with_their_level(capsys):
    with logging_to_stderr():
        LOG.info("fetching %s", "x")
        LOG.warning("disk is full")
        LOG.error("step 3 hangs")
    assert capsys.readouterr().err == "fetching x\nwarning: disk is full\nerror: step 3 hangs\n"


def test_debug_records_are_dropped_and_nested_blocks_print_once(capsys):
    with logging_to_stderr(), logging_to_stderr():
        LOG.debug("detail")
        LOG.warning("once")
    assert capsys.readouterr().err == "warning: once\n"


def test_handler_is_removed_after_the_block(capsys, caplog):
    with logging_to_stderr():
        pass
    LOG.warning("later")
    assert capsys.readouterr().err == ""
    assert [record.message for record in caplog.records] == ["later"]
