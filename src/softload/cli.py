"""The `softload` command: `replay`, `doctor`, `shapes`."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import structlog
import typer
from rich.console import Console
from rich.table import Table

from softload.config import DraftPolicy, Integrity, Layout, ReadMode
from softload.doctor import diagnose
from softload.errors import LandingMemoryError, SoftloadError, StoreSetupError
from softload.replay.options import AdmissionMode, ReplayOptions
from softload.replay.progress import PlainProgress, TerminalProgress
from softload.replay.recorder import Recorder
from softload.replay.report import summary_rows, summary_table
from softload.replay.runner import is_clean, replay
from softload.replay.shapes import SHAPES, DraftKind
from softload.replay.timeline import chrome_trace
from softload.replay.trace import TraceError, TraceRequest
from softload.stores import parse_size

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in ("requests", "shape", "read_mode", "speed", "layer_time", "deadline", "landing", "max_running", "fault")
} | {"landing_bytes": "--landing"}
"""What errors of the library start with, and how a user wrote it."""

_FAULTS = (
    "A fault, repeatable: evict=P, remove=P, late=P, malformed=P, slow=P:SECONDS, hang=N:SECONDS; corrupt=P with "
    "--integrity full; draft-loss=P with a draft; and of the processes of an embedded Mooncake, such as "
    "kill-owner@SECONDS|MOMENT[:SECONDS]."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"softload {metadata.version('softload')}")
        except metadata.PackageNotFoundError:
            typer.echo("softload, not installed")
        raise typer.Exit


@app.callback()
def softload_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fail-soft loading of KV-cache pages: replay traces, check an installation, list shapes."""


@app.command("replay")
def replay_command(
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="Trace file (FAST'25 format); without: a synthetic one.")
    ] = None,
    store: Annotated[str, typer.Option(help="URL of the store.")] = "memory://",
    requests: Annotated[
        int | None, typer.Option(help="Requests to replay; default: all of TRACE, 600 of a synthetic one.")
    ] = None,
    shape: Annotated[
        str, typer.Option(help="Model shape, or NAME/FACTOR for its bytes divided; see `softload shapes`.")
    ] = "mini",
    layout: Annotated[Layout, typer.Option(help="How pages become objects.")] = Layout.GROUPED,
    read_mode: Annotated[ReadMode, typer.Option(help="How layout `page` is read.")] = ReadMode.AUTO,
    draft: Annotated[DraftKind, typer.Option(help="How the draft is stored.")] = DraftKind.NONE,
    draft_policy: Annotated[DraftPolicy, typer.Option(help="What a lost draft page costs.")] = DraftPolicy.DROP,
    admission: Annotated[AdmissionMode, typer.Option(help="When slots are taken.")] = AdmissionMode.STREAM,
    speed: Annotated[str, typer.Option(metavar="FACTOR|max", help="How much faster than the trace to arrive.")] = "max",
    layer_time: Annotated[float, typer.Option(metavar="MS", help="What computing one layer takes.")] = 0.0,
    integrity: Annotated[Integrity, typer.Option(help="How the loader checks bytes.")] = Integrity.SAMPLE,
    deadline: Annotated[float | None, typer.Option(metavar="S", help="Deadline of a load; default: 5.")] = None,
    landing: Annotated[str | None, typer.Option(metavar="SIZE", help="Landing memory; default: 256MiB.")] = None,
    max_running: Annotated[int, typer.Option(metavar="N", help="Requests that hold slots at a time.")] = 16,
    fault: Annotated[list[str] | None, typer.Option(metavar="SPEC", help=_FAULTS)] = None,
    seed: Annotated[int, typer.Option(help="Of the synthetic trace and of faults.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there; - for standard output.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write figures and plots there, as one page.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write a trace of loads and lanes there, for Perfetto.")
    ] = None,
) -> None:
    """Replay a request trace against a store, check every restored byte, and report.

    Exit status: 0 when nothing was lost, leaked or mismatched, 1 otherwise, 2 for a bad call.
    """
    try:
        options = ReplayOptions(
            trace=trace,
            store=store,
            requests=requests,
            shape=shape,
            layout=layout,
            read_mode=read_mode,
            draft=draft,
            draft_policy=draft_policy,
            admission=admission,
            speed=None if speed == "max" else _number("speed", speed),
            layer_time=layer_time / 1e3,
            integrity=integrity,
            deadline=deadline,
            landing=None if landing is None else _size("landing", landing),
            max_running=max_running,
            faults=tuple(fault or ()),
            seed=seed,
        )
        trace_requests = _requests(options)
        for option, file in (("--json", json_file), ("--report", report), ("--timeline", timeline)):
            _check_writable(option, file)
    except ValueError as error:
        _fail(_with_option(str(error), store), status=2)
    report_page = _page_maker() if report is not None else None
    recorder = Recorder() if report is not None or timeline is not None else None
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    console = Console(stderr=json_file == Path("-"))
    bar = TerminalProgress(console) if console.is_terminal else None
    errors: list[BaseException] = []
    figures: dict[str, object] = {}
    try:
        with bar or nullcontext():
            figures = asyncio.run(replay(options, trace_requests, bar or PlainProgress(console), recorder))
    except* (SoftloadError, ValueError) as group:  # alone, or from within the loader's task group
        errors = list(_leaves(group))
        if any(isinstance(error, ValueError) and _with_option(str(error), store) == str(error) for error in errors):
            raise  # not about an option: a fault of ours
    if errors:
        store_is_down = all(isinstance(error, StoreSetupError) for error in errors)
        _fail("; ".join(_told(error, store) for error in errors), status=1 if store_is_down else 2)
    console.print(summary_table(figures))
    if json_file is not None:
        text = json.dumps(figures, indent=2) + "\n"
        if json_file == Path("-"):
            sys.stdout.write(text)
        else:
            json_file.write_text(text, encoding="utf-8")
    if recorder is not None and timeline is not None:
        timeline.write_text(json.dumps(chrome_trace(recorder)), encoding="utf-8")
    if recorder is not None and report is not None and report_page is not None:
        report.write_text(report_page(figures, recorder, summary_rows(figures)), encoding="utf-8")
    if not is_clean(figures):
        raise typer.Exit(1)


@app.command("doctor")
def doctor_command(
    store: Annotated[
        str, typer.Option(help="URL of the store to try; default: a Mooncake store of its own.")
    ] = "mooncake://embedded?segment=64MiB",
) -> None:
    """Check this installation and a store, and say what to do about what is missing.

    Exit status: 0 fit, 1 something is missing, 2 a bad call.
    """
    try:
        checks = diagnose(store)
    except ValueError as error:
        _fail(_with_option(str(error), store), status=2)
    console = Console()
    for check in checks:
        mark = {True: "[green]ok     [/green]", False: "[red]missing[/red]", None: "[yellow]note   [/yellow]"}[check.ok]
        console.print(f"{mark} {check.name}: ", end="", soft_wrap=True)
        console.print(check.found, markup=False, highlight=False, soft_wrap=True)
        if check.advice:
            console.print(f"        -> {check.advice}", markup=False, highlight=False, soft_wrap=True)
    if any(check.ok is False for check in checks):
        raise typer.Exit(1)


@app.command("shapes")
def shapes_command() -> None:
    """List the model shapes that `replay` knows."""
    table = Table("name", "pools", "layers", "page", "KiB a page and layer", "KiB a page", "note", box=None)
    table.columns[0].no_wrap = True
    for column in table.columns[2:6]:
        column.justify = "right"
    for shape in SHAPES.values():
        table.add_row(
            shape.name,
            shape.family,
            str(shape.num_layers),
            str(shape.page_size),
            f"{shape.page_bytes / shape.num_layers / 1024:,.1f}",
            f"{shape.page_bytes / 1024:,.0f}",
            shape.note,
        )
    Console().print(table)


def _page_maker() -> Callable[[dict[str, object], Recorder, list[tuple[str, str]]], str]:
    try:
        from softload.replay.page import report_page
    except ModuleNotFoundError as error:
        _fail(f"--report: expected the package plotly, found none ({error}); install softload[report]", status=2)
    return report_page


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number or max, got {text!r}") from None


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _requests(options: ReplayOptions) -> list[TraceRequest]:
    try:
        return options.read_requests()
    except TraceError:
        raise  # names file and line
    except OSError as error:
        raise ValueError(f"TRACE: expected a file that can be read, got {options.trace}: {error.strerror}") from None


def _check_writable(option: str, file: Path | None) -> None:
    """Before the run, whose figures would be lost."""
    if file is None or (option == "--json" and file == Path("-")):
        return
    was_there = file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"{option}: expected a file that can be written, got {file}: {error.strerror}") from None
    if not was_there:
        file.unlink()


def _told(error: BaseException, store: str) -> str:
    text = _with_option(str(error), store)
    if isinstance(error, LandingMemoryError):
        return f"--landing: {text.replace('`landing_bytes`', 'one')}"
    return text


def _with_option(message: str, store: str) -> str:
    """A message of the library, with the option's name in place of the setting's."""
    if message.startswith(repr(store)):
        return f"--store {message}"
    setting = re.match(r"[a-z_]+", message)
    if setting is None or setting[0] not in _OPTIONS:
        return message
    return _OPTIONS[setting[0]] + message[setting.end() :]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _fail(message: str, *, status: int) -> NoReturn:
    typer.echo(f"softload: {message}", err=True)
    raise typer.Exit(status)
