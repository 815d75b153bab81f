"""The steps of a run, in order; each can be repeated after an interruption without a different result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ..checkpoint.companions import companions
from ..checkpoint.config import quantization_config
from ..checkpoint.directory import FOLDS, INDEX, JOURNAL, MANIFEST, REPORT, SINGLE, Checkpoint, read_json
from ..checkpoint.folds import write_folds
from ..checkpoint.inventory import MADE_BY
from ..checkpoint.manifest import manifest
from ..checkpoint.storage import Storage
from ..checkpoint.tensorfile import Entry, TensorFileWriter, layout
from ..errors import FlowError
from ..hf.coverage import require_mostly_quantized
from ..hf.head import untied
from ..hf.layers import Structure
from ..hf.structure import find_linears
from . import overlap
from . import report as reports
from .changes import Changes, scaled_outputs
from .data import rehearse, require_data, spelled
from .distributed import Team
from .journal import Journal, digest, digest_file
from .options import Options, Plan, Progress
from .stream import ShardJob

#: Of every shard. Readers look for the format.
METADATA = {"format": "pt", **MADE_BY}


def is_complete(out: Path) -> bool:
    """Whether a run into this directory has ended."""
    return (out / REPORT).exists() and (out / "config.json").exists() and not (out / JOURNAL / "run.json").exists()


@dataclass
class Run:
    """One conversion, in the order it happens."""

    source: Checkpoint
    #: None for a run that only says what it would do.
    target: Path | None
    options: Options
    plan: Plan
    team: Team
    device: torch.device
    progress: Progress
    calibration: Path | None = None
    evaluation: Path | None = None
    #: Accept a checkpoint of which most stays in floating point.
    allow_float: bool = False
    structure: Structure = field(init=False)
    #: Which layers were given more bits, and the figures that decided it.
    precision: dict[str, Any] | None = field(init=False, default=None)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        if self.plan.needs_calibration and self.calibration is None:
            raise FlowError(
                f"{options.why_data(self.plan)} needs calibration data: texts (.txt, .jsonl or .parquet) or tokens "
                "(.safetensors); pass --calibration FILE, or --calibration builtin for a short text of baracuda's own"
            )
        self._check_options()
        self.structure = find_linears(self.source, self.plan.recipe, options.ignore, options.quantize_head)
        if not self.allow_float:
            require_mostly_quantized(self.structure, self.source, options.group_size)
        if self.target is not None:
            self.journal = Journal(self.target)

    @property
    def out(self) -> Path:
        assert self.target is not None, "a dry run has no output"
        return self.target

    def _check_options(self) -> None:
        """Raise for everything that is known to be wrong before anything is read or written."""
        self.options.check()
        for data in filter(None, (self.calibration, self.evaluation)):
            require_data(data)
        if self.target is not None and self.out.resolve() == self.source.directory.resolve():
            raise FlowError(f"{self.out}: the output cannot be the model's own directory; choose another directory")

    def fingerprint(self) -> dict[str, Any]:
        """What the bytes of the result depend on."""
        return {
            "baracuda": __version__,
            "options": self.options.record(),
            "source": {name: digest(file.header.decode()) for name, file in self.source.shards.items()},
            "sizes": {name: file.path.stat().st_size for name, file in self.source.shards.items()},
            "config": digest(self.source.config),
            "calibration": digest_file(self.calibration) if self.calibration else None,
        }

    def record(self) -> dict[str, Any]:
        """The fingerprint of a run that has ended, with the versions of the files it read."""
        return self.fingerprint() | {
            "files": {name: file.version for name, file in self.source.shards.items()},
            "evaluation": digest_file(self.evaluation) if self.evaluation else None,
        }

    def version(self, shard: str) -> list[Any]:
        """The versions of the files that a shard of the result is made from; calibration reads all of them."""
        read = self.source.shards if self.plan.needs_calibration else [shard]
        return [self.source.shards[name].version for name in read]

    def preview(self) -> dict[str, Any]:
        """What the run would do; nothing is written."""
        self._choose(None)
        return self._preview()

    def _preview(self) -> dict[str, Any]:
        from .preview import preview

        chosen = {"precision": self.precision} if self.precision is not None else {}
        return preview(self.source, self.structure, self.plan, self.options, self.device, self.evaluation) | chosen

    def _choose(self, kept: Path | None) -> None:
        """Measure which layers need more bits and change their schemes, or read what was measured; `kept` is where."""
        if not self.plan.chooses:
            return
        assert self.calibration is not None
        from .precision import choose_precision, take_over

        found = read_json(kept) if kept is not None and self.team.leads and kept.exists() else None
        if found is None and self.team.leads:
            found = choose_precision(
                self.source, self.structure, self.calibration, self.options, self.device, self.progress
            )
            if kept is not None:
                self.journal.write_json(kept, found)
        self.precision = found = self.team.gather(found)[0]
        take_over(self.structure, found)
        if not self.allow_float:
            require_mostly_quantized(self.structure, self.source, self.options.group_size)

    def go(self, *, resume: bool, on_plan: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        try:
            return self._steps(resume=resume, on_plan=on_plan)
        finally:
            self.journal.release()

    def _steps(self, *, resume: bool, on_plan: Callable[[dict[str, Any]], None] | None) -> dict[str, Any]:
        started = time.perf_counter()
        if resume and self.team.gather(is_complete(self.out))[0]:
            return self._ended()
        self._together(lambda: self.journal.begin(self.fingerprint(), resume=resume))
        try:
            version = [file.version for file in self.source.shards.values()]
            self._choose(self.journal.made_from(version, "precision.json"))
            if on_plan is not None and self.team.leads:
                on_plan(self._preview())
            self._rehearse()
            changes = self._calibrate()
            self._quantize_blocks(changes)
        except Exception:
            if self.team.leads and not any(self.journal.folder.glob("*block-*")):
                self.journal.discard()  # nothing is done yet: the next try may differ
            raise
        plans = {name: self._layout(name) for name in self.source.shards}
        self._convert(plans, changes)
        self.team.barrier()
        if not self.team.leads:
            self.team.barrier()
            return {}
        for path in companions(self.source.directory, self.out):
            self.journal.copy(self.source.directory / path, self.out / path)
        self._write_index(plans)
        if changes.folds:
            write_folds(self.journal.temporary(FOLDS), changes.folds)
            self.journal.publish(self.journal.temporary(FOLDS), self.out / FOLDS)
        self.journal.write_json(self.out / "config.json", self._config())
        result, failure = self._report(changes, time.perf_counter() - started)
        self.journal.write_bytes(self.out / MANIFEST, manifest(self.out, JOURNAL).encode())
        self.journal.end()
        self.team.barrier()
        if failure is not None:
            raise FlowError(
                f"{self.out}: the checkpoint is complete, but its evaluation failed ({type(failure).__name__}: "
                f"{str(failure)[:300]}), and the report has none; once that is solved: baracuda eval {self.out} "
                f"--text {self.evaluation} --against {self.source.directory}"
            ) from failure
        return result

    def _config(self) -> dict[str, Any]:
        """The model's own, with the type that readers took from its first tensor, which can be a scale now."""
        quantization = quantization_config(self.structure.recipe(), self.structure.ignore())
        config = dict(self.source.config)
        if self.structure.head is not None and self.structure.head.tied:
            config = untied(config)
        config["quantization_config"] = quantization
        if not config.get("dtype") and not config.get("torch_dtype") and (dtype := self.source.dtype) is not None:
            config["torch_dtype"] = dtype  # the name that every version of transformers reads
        return config

    def _ended(self) -> dict[str, Any]:
        """The report of the run that has ended here; raises where that is another run than the one asked for."""
        content = reports.read_report(self.out)
        asked = self.record()
        del asked["baracuda"]  # a result stands, whichever version made it
        if asked["evaluation"] is None:
            del asked["evaluation"]  # one that nobody asks for does no harm
        self.journal.require_ended(reports.made_from(content), asked)
        self._together(self.journal.sweep)
        return content if self.team.leads else {}

    def _together(self, action: Callable[[], None]) -> None:
        """Let rank 0 act, and raise its failure on every rank."""
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

    def _calibrate(self) -> Changes:
        """Calibrate, or read what an interrupted run has calibrated."""
        if not self.plan.measures:
            return Changes()
        assert self.calibration is not None
        measured = [file.version for file in self.source.shards.values()]
        tensors = self.journal.made_from(measured, "prepared.safetensors")
        notes = self.journal.made_from(measured, "prepared.json")
        folds = self.journal.made_from(measured, FOLDS)
        # The notes are renamed last: their presence says that all files are whole.
        if self.team.gather(notes.exists())[0]:
            return Changes.load(tensors, notes, folds)
        from .calibrate import calibrate  # takes a while to import

        made = calibrate(self.source, self.structure, self.plan, self.options, self.calibration, self.team, self.device,
                         self.progress)  # fmt: skip

        def keep() -> None:
            temporary = [self.journal.temporary(name) for name in ("prepared", "notes", "folds")]
            made.save(*temporary)
            for path, final in ((temporary[0], tensors), (temporary[2], folds), (temporary[1], notes)):
                self.journal.publish(path, final)

        for file in self.source.shards.values():
            file.require_unchanged()
        self._together(keep)
        return made

    def _quantize_blocks(self, changes: Changes) -> None:
        """Quantize what is calibrated block by block, or read what an interrupted run has done of it."""
        if not self.plan.sequential:
            return
        assert self.calibration is not None
        from .blockwise import Blockwise  # takes a while to import

        version = [file.version for file in self.source.shards.values()]
        Blockwise(self.source, self.structure, self.options, self.calibration, changes, self.journal, version,
                  self.team, self.device, self.progress).run()  # fmt: skip
        for file in self.source.shards.values():
            file.require_unchanged()

    def _rehearse(self) -> None:
        """Raise here, before any work, where the evaluation will not be possible."""
        if self.evaluation is not None:
            from ..hf.rehearsal import require_loadable  # takes a while to import

            model, data = self.source.directory, self.evaluation
            self._together(lambda: rehearse(model, data, self.options, self.device))
            self._together(lambda: require_loadable(self.device))

    def _layout(self, shard: str) -> list[Entry]:
        """The tensors of a shard of the result, with their places in the file."""
        stored: list[Entry] = []
        for name, entry in self.source.shards[shard].entries.items():
            module = self.structure.quantized.get(name)
            if module is None or name in self.structure.kept:
                stored.append(entry)
            if module is not None:
                stored += Storage(self.structure.choices[module].scheme).entries(module, entry)
        return layout(stored)

    def _convert(self, plans: dict[str, list[Entry]], changes: Changes) -> None:
        """Whole shards to each rank, or, with more ranks than shards, the tensors of each shard to all of them."""
        missing = [n for n in plans if not self.team.gather(self.journal.finished(n, self.version(n)))[0]]
        split = len(plans) < self.team.size
        mine = self.team.share({name: self.source.shards[name].path.stat().st_size for name in missing})
        workers = self.team if split else Team()
        work = {name: self._share(name, workers) for name in (missing if split else sorted(mine))}
        total = sum(entry.nbytes for entries in work.values() for entry in entries)
        for name, entries in work.items():
            self._convert_shard(name, plans[name], entries, changes, workers, total)

    def _share(self, shard: str, workers: Team) -> list[Entry]:
        """The tensors of a shard that are this rank's, in the order they lie in the file."""
        entries = self.source.shards[shard].entries
        mine = set(workers.share({name: entry.nbytes for name, entry in entries.items()}))
        return sorted((entry for name, entry in entries.items() if name in mine), key=lambda entry: entry.start)

    def _convert_shard(
        self, name: str, plan: list[Entry], mine: list[Entry], changes: Changes, workers: Team, total: int
    ) -> None:
        source = self.source.shards[name]
        temporary = self.journal.temporary(name)
        if workers.leads:
            (self.out / name).unlink(missing_ok=True)  # from another version of the input
            writer = TensorFileWriter(temporary, plan, METADATA)
        workers.barrier()
        if not workers.leads:
            writer = TensorFileWriter(temporary, plan, METADATA, create=False)
        job = ShardJob(
            source,
            writer,
            {tensor: m for tensor, m in self.structure.quantized.items() if tensor in source.entries},
            self.structure.choices,
            changes,
            self.device,
            lambda tensor, count: self.progress("quantize", count, total, tensor),
            self.structure.kept,
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

    def _report(self, changes: Changes, seconds: float) -> tuple[dict[str, Any], Exception | None]:
        """Write the report; also return what made the evaluation fail, which the checkpoint must not be lost to."""
        statistics: dict[str, Any] = {}
        for shard in self.source.shards:
            statistics |= read_json(self.journal.statistics(shard, self.version(shard)))
        content = reports.collect(
            self.source, self.out, self.options.scheme, self.plan.recipe, self.structure, statistics, changes.notes
        )
        if self.precision is not None:
            content["precision"] = self.precision
        size = content["size"]["before"]
        content["run"] = reports.run_section(size, seconds, self.device, self.team.size, self.record())
        given = {"model": self.source.directory, "calibration": self.calibration, "evaluation": self.evaluation}
        content["run"]["inputs"] = {name: spelled(path) for name, path in given.items() if path is not None}
        failure = None
        if self.evaluation is not None:
            try:
                content["evaluation"] = self._evaluate(self.evaluation, changes)
                content["run"]["tokens_per_second"] = content["evaluation"].pop("tokens_per_second")
                content["notes"] += filter(None, [overlap.warning(content["evaluation"])])
            except Exception as error:  # whatever it is, the weights are written
                failure = error
                content["run"]["made_from"]["evaluation"] = None
        reports.write(self.journal, self.out, content)
        return content, failure

    def _evaluate(self, data: Path, changes: Changes) -> dict[str, Any]:
        from .evaluate import evaluate  # takes a while to import

        return evaluate(
            self.source.directory,
            self.out,
            data,
            self.options,
            self.device,
            self.progress,
            scaled_outputs(changes.notes),
            self.calibration,
        )
