"""Checkpoints of ZeRO stage 3, whose files have a rank's pieces of all parameters, on the number of ranks that saved."""

from pathlib import Path

from lightning_zenflow.checkpoint.files import CheckpointError


def refuse_other_ranks(path: Path, world_size: int) -> None:
    """Raises CheckpointError for what is no checkpoint of stage 3 by `world_size` ranks."""
    if not (path / "latest").is_file():
        raise CheckpointError(f"checkpoint {path}: it must be a directory with DeepSpeed's file `latest`")
    folder = path / (path / "latest").read_text(errors="replace").strip().lstrip("/")
    if (folder / "mp_rank_00_model_states.pt").is_file():
        raise CheckpointError(f"checkpoint {path}: the ZeRO stage must be 3, as in this training, got 1 or 2")
    for kind in ("model", "optim"):
        files = list(folder.glob(f"*zero_pp_rank_*_mp_rank_00_{kind}_states.pt"))
        if len(files) != world_size:
            raise CheckpointError(
                f"checkpoint {path}: it must have the files zero_pp_rank_..._{kind}_states.pt of {world_size} ranks, got {len(files)}:"
                " under stage 3 the number of ranks must be that of the run that saved"
            )
