"""Settings of the loggers (`trainer.tracking.params.<logger>`); null leaves the SDK's value."""

from __future__ import annotations

from pydantic import Field

from rlctl.params import Params


def _of(variable: str) -> str:
    return f"null = {variable}, if set"


class WandbParams(Params):
    """Settings of W&B."""

    entity: str | None = Field(
        default=None, description=f"team or user that owns the run; {_of('WANDB_ENTITY')}"
    )
    group: str | None = Field(default=None, description="group of the run; null = its sweep")
    job_type: str | None = Field(default=None, description="type of the run; null = train or trial")
    tags: tuple[str, ...] = Field(
        default=(), description="tags in addition to rlctl and trainer.tracking.tags"
    )
    notes: str | None = Field(
        default=None, description="notes of the run; null = trainer.tracking.description"
    )
    base_url: str | None = Field(
        default=None, description=f"address of a W&B server; {_of('WANDB_BASE_URL')}"
    )
    save_code: bool = Field(
        default=False,
        description="upload the Python files of the current folder, which may have secrets",
    )


class SwanLabParams(Params):
    """Settings of SwanLab."""

    workspace: str | None = Field(
        default=None,
        description=f"user or organization that owns the project; {_of('SWANLAB_WORKSPACE')}",
    )
    group: str | None = Field(default=None, description="group of the run; null = its sweep")
    job_type: str | None = Field(default=None, description="type of the run; null = train or trial")
    tags: tuple[str, ...] = Field(
        default=(), description="tags in addition to rlctl and trainer.tracking.tags"
    )
    notes: str | None = Field(
        default=None,
        description="description of the run; null = trainer.tracking.description",
    )
    public: bool | None = Field(
        default=None,
        description="make a new project public; null = private, or SwanLab's setting",
    )
    base_url: str | None = Field(
        default=None, description=f"address of a SwanLab server; {_of('SWANLAB_API_HOST')}"
    )


class MlflowParams(Params):
    """Settings of MLflow."""

    tracking_uri: str | None = Field(
        default=None,
        description=f"server or database; {_of('MLFLOW_TRACKING_URI')}, else runs/mlflow.db",
    )
    experiment: str | None = Field(
        default=None, description="experiment of the run; null = trainer.project_name"
    )
    tags: dict[str, str] = Field(
        default={}, description="tags of the run with values, such as {team: a}"
    )


class TrackioParams(Params):
    """Settings of Trackio."""

    space_id: str | None = Field(
        default=None, description=f"Hugging Face Space to log to; {_of('TRACKIO_SPACE_ID')}"
    )
    server_url: str | None = Field(
        default=None, description=f"address of a Trackio server; {_of('TRACKIO_SERVER_URL')}"
    )
    private: bool | None = Field(
        default=None, description="make a new Space private; null = the default of its owner"
    )
    group: str | None = Field(default=None, description="group of the run; null = its sweep")


class TensorBoardParams(Params):
    """Settings of TensorBoard."""

    log_dir: str | None = Field(
        default=None,
        description="root of event files, in PROJECT/RUN below it; "
        "null = TENSORBOARD_DIR, if set, else the run's folder",
    )
