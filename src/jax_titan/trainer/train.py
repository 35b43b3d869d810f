"""The training loop: the tour guide of the program.

Read `train` top to bottom: data, run directory, devices, model and layout, restore, steps, the end. What can be
wrong with the input is found before anything is written or any device is touched.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import xxhash

from jax_titan.config import Config, ConfigError, to_toml
from jax_titan.data.errors import DataError
from jax_titan.data.mixture import MixtureStore
from jax_titan.data.store import TokenStore
from jax_titan.data.text import Prefetch, TextDataset
from jax_titan.observability import records
from jax_titan.observability.console import Console
from jax_titan.observability.env import device_peak_bytes, environment, host_peak_bytes
from jax_titan.observability.summarize import format_summary, summarize
from jax_titan.trainer.corpus import TOKENIZER, open_datasets, open_store
from jax_titan.trainer.rundir import check_run_dir, claim_run_dir, record_config
from jax_titan.trainer.signals import StopSignals

if TYPE_CHECKING:
    from jax_titan.trainer.checkpoint import Checkpoints
    from jax_titan.trainer.layout import Layout
    from jax_titan.trainer.optimizer import Optimizer, RateTable
    from jax_titan.trainer.state import Load, TrainState

COMPLETE, FAILED, USAGE, RESUMABLE = 0, 1, 2, 75


def train(config: Config, command: list[str] | None = None) -> int:
    """Train a model, or go on with its run, and leave a run directory.

    Args:
        config: resolved and checked for contradictions.
        command: how the program was called, for the record.

    Returns:
        The exit code: 0 the run or `train.stop_after` is complete, 75 stopped early after saving.

    Raises:
        ConfigError: the run directory holds another run, or the devices do not suffice.
        DataError: the corpus cannot be read.
    """
    check_run_dir(config)
    store = open_store(config)
    from jax_titan.trainer.devices import choose_devices

    devices = choose_devices(config)
    from jax_titan.trainer.build import build_layout, build_model, build_optimizer
    from jax_titan.trainer.placement import Placement
    from jax_titan.trainer.weights import weights_to_start_from

    model, optimizer = build_model(config, store.vocab_size), build_optimizer(config)
    layout = build_layout(config, model, optimizer, devices)
    with ExitStack() as stack:
        load = weights_to_start_from(config, model, store.tokenizer.digest)
        run = _open_run(config, store, layout, optimizer, load, stack)
        if run.start_step >= run.end_step:
            run.console.note(
                f"{config.run.dir} is complete at step {run.start_step}; "
                "a larger train.steps or train.stop_after goes on"
            )
            return COMPLETE
        run.recorder.emit(
            records.AttemptStart(
                resume_step=run.start_step,
                total_steps=config.train.steps,
                layout=config.parallel.layout,
                stages=config.pipeline.stages if config.parallel.layout == "mpmd" else 1,
                schedule=config.pipeline.schedule if config.parallel.layout == "mpmd" else None,
                microbatches=config.train.microbatches,
                parameters=model.parameter_count(),
                data_digest=store.digest,
                config_digest=_digest(to_toml(config)),
                unigram_loss=store.unigram_nats(),
                command=command if command is not None else sys.argv,
                **environment(devices),
            )
        )
        for line in Placement.of(config, model, optimizer).lines():
            run.console.note(line)
        reason, exit_code, message = "crash", FAILED, None
        stop = stack.enter_context(StopSignals())
        try:
            reason = run.train(run.compile_and_restore(), stop.asked)
            exit_code = RESUMABLE if reason in ("sigint", "sigterm") else COMPLETE
        except KeyboardInterrupt:
            reason, exit_code = "sigint", RESUMABLE
            raise
        except BaseException as error:
            message = repr(error)
            exit_code = USAGE if isinstance(error, ConfigError | DataError) else FAILED
            raise
        finally:
            stop.ignore()
            run.recorder.emit(
                records.AttemptEnd(
                    reason=reason,
                    exit_code=exit_code,
                    step=run.done,
                    host_peak_bytes=host_peak_bytes(),
                    device_peak_bytes=device_peak_bytes(devices),
                    seconds=time.monotonic() - run.started,
                    message=message,
                )
            )
        _say_how_it_ended(run, exit_code)
    return exit_code


def _say_how_it_ended(run: _Run, exit_code: int) -> None:
    run.console.close()
    if exit_code == RESUMABLE:
        where = f"after step {run.done}, saved" if run.done > run.start_step else "before a step was done"
        _say(f"stopped {where}; run the same command again to go on")
    _say(format_summary(summarize(run.config.run_dir)))
    _say(f"run directory: {run.config.run.dir}")


@dataclasses.dataclass
class _Run:
    """One attempt at a run: everything that the loop needs, and how far it has come."""

    config: Config
    layout: Layout
    training: Prefetch
    validation: TextDataset | None
    checkpoints: Checkpoints
    recorder: records.Recorder
    console: Console
    learning_rates: RateTable
    facts: dict[str, Any]
    load: Load | None
    start_step: int
    end_step: int
    started: float
    done: int
    clock: float = 0.0

    def compile_and_restore(self) -> TrainState:
        """Make the layout ready. Returns a fresh state, or that of the last checkpoint."""
        report = self.layout.compile()
        self.recorder.emit(
            records.Compile(
                seconds=report.seconds,
                lower_seconds=report.lower_seconds,
                partition_seconds=report.partition_seconds,
                xla_seconds=report.xla_seconds,
                fragments=report.fragments,
                transfers_per_step=report.transfers_per_step,
            )
        )
        if self.start_step:
            saved = self.checkpoints.restore(self.start_step, self.layout.state_shardings())
            return self.layout.adopt(*saved)
        return self.layout.init(self.config.run.seed, self.load)

    def train(self, state: TrainState, stop: Callable[[], str | None]) -> str:
        """Run the steps that are left. Returns why it ended: ok, stop_after, or the signal."""
        config = self.config
        if signal_name := stop():
            return signal_name
        self.clock = time.monotonic()
        pending: _Pending | None = None
        for step in range(self.start_step + 1, self.end_step + 1):
            asked = time.monotonic()
            batch = self.training.batch(step - 1)
            waited = time.monotonic() - asked
            state, metrics = self.layout.step(state, batch)
            # The metrics of a step are fetched while the next one runs: the devices never wait for the host.
            self._record(pending)
            pending = _Pending(step, metrics, int((batch["weights"] > 0).sum()), waited)
            # Asked once a step: a signal that comes later is the next step's affair.
            signal_name = stop()
            evaluate = _due(step, config.eval.every) or step == config.train.steps
            save = _due(step, config.checkpoint.every) or bool(signal_name) or step == self.end_step
            if evaluate or save:
                self._record(pending)
                pending = None
                if save:
                    self._save(state, step)
                if evaluate:
                    self._evaluate(state, step)
                self.clock = time.monotonic()
            self._report_saved()
            if signal_name and step < self.end_step:
                self._report_saved(wait=True)
                return signal_name
        self._report_saved(wait=True)
        return "ok" if self.end_step == config.train.steps else "stop_after"

    def _record(self, pending: _Pending | None) -> None:
        if pending is None:
            return
        import jax

        # Block first, then fetch: a signal handler runs while blocked, but not inside a fetch.
        jax.block_until_ready(pending.metrics)
        now = time.monotonic()
        self.recorder.emit(
            records.Step(
                step=pending.step,
                loss=float(pending.metrics["loss"]),
                grad_norm=float(pending.metrics["grad_norm"]),
                learning_rate=self.learning_rates[pending.step - 1],
                tokens=pending.tokens,
                step_seconds=now - self.clock,
                data_wait_seconds=pending.data_wait_seconds,
            )
        )
        self.clock = now
        self.done = pending.step

    def _evaluate(self, state: TrainState, step: int) -> None:
        if self.validation is None:
            return
        start = time.monotonic()
        nats, tokens, covered = 0.0, 0, 0
        last = None
        for batch in self.validation.eval_batches(self.config.eval.batches):
            dispatched = self.layout.eval_step(state, batch)
            nats += float(last) if last is not None else 0.0  # of the batch before, while this one runs
            last = dispatched
            tokens += int((batch["weights"] > 0).sum())
            covered += self.validation.target_bytes(batch)
        nats += float(last) if last is not None else 0.0
        if not tokens:
            return
        self.recorder.emit(
            records.Eval(
                step=step,
                loss=nats / tokens,
                tokens=tokens,
                bytes=covered,
                bits_per_byte=nats / covered / _LN2 if covered else None,
                seconds=time.monotonic() - start,
            )
        )

    def _save(self, state: TrainState, step: int) -> None:
        self.checkpoints.save(step, *self.layout.to_save(state), self.facts)

    def _report_saved(self, wait: bool = False) -> None:
        """Record the checkpoints that were committed meanwhile; with `wait` also the one still being written."""
        for saved in self.checkpoints.finished(wait):
            self.recorder.emit(
                records.Checkpoint(
                    step=saved.step,
                    seconds=saved.seconds,
                    blocking_seconds=saved.blocking_seconds,
                    bytes=saved.bytes,
                    path=str(saved.path),
                )
            )


def _say(text: str) -> None:
    """Print for whoever still listens: a closed pipe changes nothing of what was done."""
    with suppress(OSError, ValueError):
        print(text, flush=True)


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A dispatched step whose metrics are not fetched yet."""

    step: int
    metrics: dict[str, Any]
    tokens: int
    data_wait_seconds: float


_LN2 = 0.6931471805599453


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _open_run(
    config: Config,
    store: TokenStore | MixtureStore,
    layout: Layout,
    optimizer: Optimizer,
    load: Load | None,
    stack: ExitStack,
) -> _Run:
    """Make or reopen the run directory, and find the last checkpoint in it."""
    from jax_titan.trainer.checkpoint import Checkpoints
    from jax_titan.trainer.optimizer import RateTable

    started = time.monotonic()
    directory = stack.enter_context(claim_run_dir(config))
    if not (directory / "config.toml").exists():  # first of all: it is what makes the directory a run
        record_config(config)
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep, config.checkpoint.asynchronous)
    stack.callback(checkpoints.close)
    facts = {"data_digest": store.digest, "tokenizer_digest": store.tokenizer.digest}
    step = checkpoints.latest_step
    if step is not None:
        saved = checkpoints.facts(step).get("data_digest")
        if saved != store.digest:
            raise ConfigError(
                [
                    f"data.path: the corpus has changed since this run began ({saved} then, {store.digest} now); "
                    "restore it, or use another run.dir"
                ]
            )
    record_config(config)
    store.tokenizer.save(directory / TOKENIZER)
    console = stack.enter_context(Console(config.train.steps))
    recorder = stack.enter_context(records.Recorder(directory / "events.jsonl", listeners=[console.show]))
    t = config.train
    datasets = open_datasets(config, store)
    training = stack.enter_context(Prefetch(datasets["train"]))
    return _Run(
        config=config,
        layout=layout,
        training=training,
        validation=datasets.get("validation"),
        checkpoints=checkpoints,
        recorder=recorder,
        console=console,
        learning_rates=RateTable(optimizer.learning_rate),
        facts=facts,
        load=load,
        start_step=step or 0,
        end_step=min(t.stop_after or t.steps, t.steps),
        started=started,
        done=step or 0,
    )


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
