"""Client of the Debug Adapter Protocol, in place of VS Code."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

LISTENING = re.compile(r"Ray debugger is listening on ([\d.]+):(\d+)")


class DebugClient:
    """Debugger attached to the process that waits in a breakpoint and logs to `log`."""

    def __init__(self, log: Path) -> None:
        while not (found := LISTENING.search(log.read_text())):
            time.sleep(0.1)
        self.connection = socket.create_connection((found[1], int(found[2])))
        self.stream = self.connection.makefile("rb")
        self.number = 0
        self.send("initialize", adapterID="python", pathFormat="path")
        self.read("initialize")
        self.send("attach", justMyCode=False)
        self.read("initialized")
        self.send("configurationDone")
        self.thread = self.read("stopped")["body"]["threadId"]

    def frames(self) -> list[str]:
        """Return the functions of the stopped thread, the innermost first."""
        self.send("stackTrace", threadId=self.thread)
        return [frame["name"] for frame in self.read("stackTrace")["body"]["stackFrames"]]

    def resume(self) -> None:
        """Let the process continue, and detach."""
        self.send("continue", threadId=self.thread)
        self.read("continue")
        self.send("disconnect")
        self.connection.close()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a request."""
        self.number += 1
        request = {"seq": self.number, "type": "request", "command": command}
        body = json.dumps(request | {"arguments": arguments}).encode()
        self.connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def read(self, name: str) -> dict[str, Any]:
        """Return the next response to the command, or event, of this name."""
        while True:
            length = 0
            while header := self.stream.readline().strip():
                length = int(header.partition(b":")[2])
            message = json.loads(self.stream.read(length))
            if name in (message.get("event"), message.get("command")):
                return message
