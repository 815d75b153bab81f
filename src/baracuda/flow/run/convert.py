"""quantize_checkpoint: a model directory in, a quantized one out, resumable at any moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...plans.plan import resolve_device
from ..checkpoint.companions import companions
from ..checkpoint.directory import INDEX, SINGLE, Checkpoint, read_json
from ..checkpoint.scheme import Scheme
from ..checkpoint.tensorfile import Entry, TensorFileWriter, layout
from ..errors import RESUME, FlowError, told
from ..hf.structure import Structure, find_linears
from ..patterns import require_pattern
from . import report as reports
from .calibrate import require_data
from .distributed import Team, team
from .journal import FOLDER, Journal, digest, digest_file
from .preparation import Preparation
from .stream import ShardJob

#: stage, bytes or steps done since the last call, total of the stage, what is being worked on
Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Options:
    """Everything that decides the bytes of the result."""

    scheme: str = "w8a8"
    activations: str = "dynamic"
    alpha: float | str = 0.5
    ignore: tuple[str, ...] = ()
    group_size: int = 128
    samples: int = 128
    sequence_length: int = 512


@dataclass
class Run:
    """One conversion, in the order it happens."""

    source: Checkpoint
    out: Path
    options: Options
    scheme: Scheme
    team: Team
    device: torch.device
    progress: Progress
    calibration: Path | None = None
    evaluation: Path | None = None
    structure: Structure = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        if self.scheme.needs_calibration and self.calibration is None:
            raise FlowError(f"{options.scheme} with {options.activations} activations needs calibration data: a text, "
                            "jsonl or safetensors file of tokens; pass --calibration FILE")  # fmt: skip
        self._check_options()
        self.structure = find_linears(self.source, self.scheme, options.ignore)
        self.journal = Journal(self.out)

    def _check_options(self) -> None:
        """Whatever can be known to be wrong before anything is read or written."""
        options = self.options
        _check_alpha(options.alpha)
        for name, least in (("samples", 1), ("sequence_length", 2)):
            if getattr(options, name) < least:
                raise FlowError(f"{name}: expected at least {least}, got {getattr(options, name)}")
        for pattern in options.ignore:
            require_pattern(pattern)
        for data in filter(None, (self.calibration, self.evaluation)):
            require_data(data)
        if self.out.resolve() == self.source.directory.resolve():
            raise FlowError(f"{self.out}: the output cannot be the model's own directory; choose another directory")

    def fingerprint(self) -> dict[str, Any]:
        """What the bytes of the result depend on."""
        return {
            "baracuda": __version__,
            "options": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self.options).items()},
            "source": {name: digest(file.header.decode()) for name, file in self.source.shards.items()},
            "sizes": {name: file.path.stat().st_size for name, file in self.source.shards.items()},
            "config": digest(self.source.config),
            "calibration": digest_file(self.calibration) if self.calibration else None,
        }

    def record(self) -> dict[str, Any]:
        """The fingerprint for when the run has ended, and nothing can be done again: with the very files it read."""
        return self.fingerprint() | {
            "files": {name: file.version for name, file in self.source.shards.items()},
            "evaluation": digest_file(self.evaluation) if self.evaluation else None,
        }

    def version(self, shard: str) -> list[Any]:
        """The state of the files that a shard of the result is made from; calibration looks at all of them."""
        read = self.source.shards if self.scheme.needs_calibration else [shard]
        return [self.source.shards[name].version for name in read]

    def go(self, *, resume: bool) -> dict[str, Any]:
        try:
            return self._steps(resume=resume)
        finally:
            self.journal.release()

    def _steps(self, *, resume: bool) -> dict[str, Any]:
        started = time.perf_counter()
        if resume and self.team.gather(is_complete(self.out))[0]:
            return self._ended()
        self._together(lambda: self.journal.begin(self.fingerprint(), resume=resume))
        try:
            self._rehearse()
            preparation = self._prepare()
        except Exception:
            if self.team.leads:
                self.journal.discard()  # nothing is done yet: the next try may differ
            raise
        plans = {name: self._plan(name) for name in self.source.shards}
        self._convert(plans, preparation)
        self.team.barrier()
        if not self.team.leads:
            self.team.barrier()
            return {}
        for path in companions(self.source.directory, self.out):
            self.journal.copy(self.source.directory / path, self.out / path)
        self._write_index(plans)
        self.journal.write_json(self.out / "config.json", self._config())
        result = self._report(preparation, time.perf_counter() - started)
        self.journal.end()
        self.team.barrier()
        return result

    def _config(self) -> dict[str, Any]:
        """The model's own, with what readers used to tell by its first tensor: that can be a scale now."""
        config = dict(self.source.config) | {"quantization_config": self.scheme.config(self.structure.ignore())}
        if not config.get("dtype") and not config.get("torch_dtype") and (dtype := self.source.dtype) is not None:
            config["torch_dtype"] = dtype  # the name that every version of transformers reads
        return config

    def _ended(self) -> dict[str, Any]:
        """The report of the run that has ended here, unless it is another than the one asked for."""
        content = read_json(self.out / reports.JSON)
        asked = self.record()
        del asked["baracuda"]  # a result stands, whichever version made it
        if asked["evaluation"] is None:
            del asked["evaluation"]  # one that nobody asks for does no harm
        self.journal.require_ended(reports.made_from(content), asked)
        self._together(self.journal.sweep)
        return content if self.team.leads else {}

    def _together(self, action: Callable[[], None]) -> None:
        """Rank 0 acts; its failure is everybody's."""
        problem = None
        if self.team.leads:
            try:
                action()
            except Exception as error:
                if self.team.size == 1:
                    raise
                problem = f"{type(error).__name__}: {error}"
        problem = self.team.gather(problem)[0]
        if problem is not None:
            raise FlowError(f"rank 0 could not go on: {problem}")

    def _prepare(self) -> Preparation:
        if not self.scheme.needs_calibration:
            return Preparation()
        assert self.calibration is not None
        measured = [file.version for file in self.source.shards.values()]
        tensors = self.journal.made_from(measured, "prepared.safetensors")
        notes = self.journal.made_from(measured, "prepared.json")
        # The notes are renamed last: their presence says that both files are whole.
        if self.team.gather(notes.exists())[0]:
            return Preparation.load(tensors, notes)
        from .prepare import prepare  # needs transformers

        made = prepare(self.source, self.structure, self.scheme, self.options, self.calibration, self.team, self.device,
                       self.progress)  # fmt: skip

        def keep() -> None:
            temporary = self.journal.temporary("prepared"), self.journal.temporary("notes")
            made.save(*temporary)
            self.journal.publish(temporary[0], tensors)
            self.journal.publish(temporary[1], notes)

        for file in self.source.shards.values():
            file.require_unchanged()
        self._together(keep)
        return made

    def _rehearse(self) -> None:
        """An evaluation that cannot be ends the run here, where nothing is done yet."""
        if self.evaluation is not None:
            from .prepare import rehearse  # needs transformers

            model, data = self.source.directory, self.evaluation
            self._together(lambda: rehearse(model, data, self.options, self.device))

    def _plan(self, shard: str) -> list[Entry]:
        stored: list[Entry] = []
        for name, entry in self.source.shards[shard].entries.items():
            module = self.structure.linears.get(name)
            stored += [entry] if module is None else self.scheme.entries(module, entry)
        return layout(stored)

    def _convert(self, plans: dict[str, list[Entry]], preparation: Preparation) -> None:
        """Whole shards to each rank, or, with more ranks than shards, the tensors of each shard to all of them."""
        missing = [n for n in plans if not self.team.gather(self.journal.finished(n, self.version(n)))[0]]
        split = len(plans) < self.team.size
        mine = self.team.share({name: self.source.shards[name].path.stat().st_size for name in missing})
        workers = self.team if split else Team()
        work = {name: self._share(name, workers) for name in (missing if split else sorted(mine))}
        total = sum(entry.nbytes for entries in work.values() for entry in entries)
        for name, entries in work.items():
            self._convert_shard(name, plans[name], entries, preparation, workers, total)

    def _share(self, shard: str, workers: Team) -> list[Entry]:
        """The tensors of a shard that are this rank's, in the order they lie in the file."""
        entries = self.source.shards[shard].entries
        mine = set(workers.share({name: entry.nbytes for name, entry in entries.items()}))
        return sorted((entry for name, entry in entries.items() if name in mine), key=lambda entry: entry.start)

    def _convert_shard(
        self, name: str, plan: list[Entry], mine: list[Entry], preparation: Preparation, workers: Team, total: int
    ) -> None:
        source = self.source.shards[name]
        temporary = self.journal.temporary(name)
        if workers.leads:
            (self.out / name).unlink(missing_ok=True)  # from another version of the input
            writer = TensorFileWriter(temporary, plan, {"format": "pt"})
        workers.barrier()
        if not workers.leads:
            writer = TensorFileWriter(temporary, plan, {"format": "pt"}, create=False)
        job = ShardJob(
            source,
            writer,
            self.scheme,
            {tensor: m for tensor, m in self.structure.linears.items() if tensor in source.entries},
            preparation,
            self.device,
            lambda tensor, count: self.progress("quantize", count, total, tensor),
        )
        try:
            statistics = job.run([entry.name for entry in mine])
        except BaseException:
            writer.abandon()
            raise
        writer.close()
        source.require_unchanged()
        everything: dict[str, Any] = {}
        for part in workers.gather(statistics):
            everything |= part
        if workers.leads:
            self.journal.write_json(self.journal.statistics(name, self.version(name)), dict(sorted(everything.items())))
            self.journal.publish(temporary, self.out / name)

    def _write_index(self, plans: dict[str, list[Entry]]) -> None:
        if self.source.index is None and list(plans) == [SINGLE]:
            return  # the name that readers look for when there is no index
        weight_map = {entry.name: shard for shard, plan in plans.items() for entry in plan}
        total = sum(entry.nbytes for plan in plans.values() for entry in plan)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        self.journal.write_json(self.out / INDEX, content)

    def _report(self, preparation: Preparation, seconds: float) -> dict[str, Any]:
        statistics: dict[str, Any] = {}
        for shard in self.source.shards:
            statistics |= read_json(self.journal.statistics(shard, self.version(shard)))
        content = reports.collect(self, statistics, preparation.notes, seconds)
        if self.evaluation is not None:
            from .evaluate import evaluate  # needs transformers

            folded = preparation.notes.get("folded", [])
            scaled = frozenset(fold["from"].removesuffix(".weight") for fold in folded)
            measured = evaluate(
                self.source.directory, self.out, self.evaluation, self.options, self.device, self.progress, scaled
            )
            content["run"]["tokens_per_second"] = measured.pop("tokens_per_second")
            content["evaluation"] = measured
        reports.write(self.journal, self.out, content)
        return content


def quantize_checkpoint(
    model_dir: str | Path,
    out: str | Path,
    *,
    scheme: str = "w8a8",
    activations: str = "dynamic",
    calibration: str | Path | None = None,
    evaluation: str | Path | None = None,
    alpha: float | str | None = None,
    ignore: str | Iterable[str] = (),
    group_size: int | None = None,
    samples: int = 128,
    sequence_length: int = 512,
    device: torch.device | str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Quantize the checkpoint in `model_dir` into `out`, and return the report (also written there).

    - `scheme`: `"w8a8"`, `"w8a8-smoothquant"` or `"w4a16"`. `activations`: `"dynamic"`, a scale per token at run time,
      or `"static"`, one per tensor from calibration.
    - `calibration`: a file of texts or tokens, for SmoothQuant and static activations. `evaluation`: one to measure the
      result on. Of each, `samples` sequences of `sequence_length` tokens are read.
    - `alpha`: SmoothQuant's strength, from 0 to 1, or `"auto"` to search it per layer; 0.5 unless given.
    - `group_size`: columns that share a scale in w4a16; 128 unless given.
    - `ignore`: Linears to leave, a pattern or several: names, shell patterns or `"re:REGEX"`. Each must match some.
    - `device`: where to compute. `resume`: go on with a run that was killed; one that has ended is left as it is.
    - `progress(stage, done, total, label)` is called as work is done: `done` since the last call, of `total` in the
      stage, in bytes or steps; `label` is the tensor or batch.

    Options that the scheme would not use are refused. Under torchrun every rank calls this and the work is shared; the
    bytes are those of one process, and so is the report: the other ranks get an empty one. Errors spell options as the
    command line does: `--group-size` is `group_size`, `--evaluate` is `evaluation`.
    """
    out = Path(out)
    options = Options(
        scheme,
        activations,
        Options.alpha if alpha is None else alpha,
        (ignore,) if isinstance(ignore, str) else tuple(ignore),
        Options.group_size if group_size is None else group_size,
        samples,
        sequence_length,
    )
    kind = Scheme.of(scheme, activations, options.group_size)
    _require_used(options, kind, alpha=alpha, group_size=group_size, calibration=calibration)
    with told(out, RESUME), team() as ranks, Checkpoint.open(Path(model_dir)) as source:
        run = Run(
            source,
            out,
            options,
            kind,
            ranks,
            _own_device(device),
            progress or (lambda stage, done, total, label: None),
            Path(calibration) if calibration is not None else None,
            Path(evaluation) if evaluation is not None else None,
        )
        return run.go(resume=resume)


def _own_device(device: torch.device | str) -> torch.device:
    """The device of this rank: under torchrun, "cuda" is a GPU each."""
    if str(device) == "cuda" and (rank := os.environ.get("LOCAL_RANK")) is not None and torch.cuda.is_available():
        device = torch.device("cuda", int(rank) % torch.cuda.device_count())
    resolved = resolve_device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise FlowError(f"device {resolved}: expected cpu or cuda, where checkpoints are quantized")
    return resolved


def is_complete(out: Path) -> bool:
    """Whether a run into this directory has ended."""
    return (out / reports.JSON).exists() and (out / "config.json").exists() and not (out / FOLDER / "run.json").exists()


def _require_used(options: Options, scheme: Scheme, **given: object) -> None:
    """An option that would change nothing was given for a reason, which is not going to be met."""
    name, kind = options.scheme, f"{options.scheme} with {options.activations} activations"
    static = "" if scheme.packed else ", or add --activations static"
    unused = {
        "alpha": (scheme.smooth, f"{name} does not smooth: drop --alpha, or use --scheme w8a8-smoothquant"),
        "group_size": (scheme.packed, f"{name} has no groups: drop --group-size, or use --scheme w4a16"),
        "calibration": (scheme.needs_calibration, f"{kind} needs no data: drop --calibration{static}"),
    }
    for option, (used, why) in unused.items():
        if given[option] is not None and not used:
            raise FlowError(why)


def _check_alpha(alpha: float | str) -> None:
    if alpha != "auto" and not (isinstance(alpha, (int, float)) and 0 <= alpha <= 1):
        raise FlowError(f"alpha: expected a number in [0, 1] or 'auto', got {alpha!r}")
