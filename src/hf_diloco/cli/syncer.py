"""``hf-diloco syncer``."""

from __future__ import annotations

import ipaddress
import logging
import shlex
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_diloco.cli.settings import with_settings
from hf_diloco.cli.table import Display
from hf_diloco.config import SyncerConfig, config_from_dict
from hf_diloco.errors import ConfigError, DiLoCoWarning
from hf_diloco.syncer.run_directory import RunDirectory

_REFRESH_SECONDS = 0.5
_MOST_JOIN_LINES = 8


@with_settings
def syncer(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where learners reach this syncer. Port 0: any free one.")
    ],
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Where this run's tape, checkpoints, token and model go.")
    ],
    settings: dict[str, Any],
    go_back_to: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            help="Go on from the checkpoint of the whole run (--save-every) at this outer step; learners are to be "
            "started again from theirs, which are listed.",
        ),
    ] = None,
    no_tls: Annotated[
        bool, typer.Option("--no-tls", help="Do not encrypt links: for a network that is encrypted already.")
    ] = False,
) -> None:
    """Run the syncer alone; it prints the line to run on each learner's machine.

    It leaves the global model in DIR/model when the run ends, and then ends too; or stays for --linger-seconds, for
    learners that are started again late and would find nobody. Ctrl-C or SIGTERM ends it before: it writes
    the values it has, and the exit code is 1. Started again with the same DIR, after that or after a crash, it goes
    on with the run: learners find it by themselves.
    """
    host, port = parse_listen(listen)
    directory = RunDirectory(run_dir)
    with directory:
        if directory.has_run:
            settings = directory.settings_of_run(settings)
            port = port or _port_of_run(directory, host)
        config = config_from_dict(settings)
        console = Console(highlight=False)
        token = directory.read_or_make_token(tls=not no_tls)
        with Display(console) as display:
            _set_up_logging(console, directory)
            if no_tls and not is_loopback(host):
                display.message(
                    "Links are not encrypted (--no-tls): whoever can read this network can read the model.",
                    style="yellow",
                )
            certificate = None if no_tls else directory.certificate
            finished = _serve(config, host, port, token, certificate, directory, display, go_back_to)
    if not finished:
        raise typer.Exit(1)


def _serve(
    config: SyncerConfig,
    host: str,
    port: int,
    token: str,
    certificate: Path | None,
    directory: RunDirectory,
    display: Display,
    go_back_to: int | None = None,
) -> bool:
    """Run the syncer and write the model. Returns whether the run came to its end."""
    from hf_diloco.links.rpc import RpcSyncerLinks  # these load torch, which takes seconds
    from hf_diloco.syncer.export import export_model
    from hf_diloco.syncer.service import Syncer

    links = RpcSyncerLinks(host, port, token, certificate=certificate, link_timeout_seconds=config.link_timeout_seconds)
    service = Syncer(config, links, directory, go_back_to=go_back_to)
    for learner_id, path in service.learner_checkpoints.items():
        display.message(f"learner {learner_id}: trainer.train(resume_from_checkpoint={path!r})")
    if service.has_ended and not config.linger_seconds:
        display.message(f"The run in {directory.path} has ended; its global model is in {directory.model}")
        return True
    directory.status.unlink(missing_ok=True)  # the last process's; what cannot start leaves it
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(config, directory, display, over), daemon=True)
    watcher.start()

    def leave_model() -> None:
        display.update(service.status(), now=True)
        if service.status()["state"] == "recovering":
            display.message(
                "Stopped before the run's learners had said what they hold. Its checkpoints are as they were: go on "
                "with the same command.",
                style="yellow",
            )
            return
        if not service.has_model:
            display.message("There is no model: no learner has supplied the initial values.", style="yellow")
            return
        with warnings.catch_warnings(record=True) as caught:
            export_model(*service.model(), directory.model, service.model_facts())
        for warning in caught:
            if issubclass(warning.category, DiLoCoWarning):
                service.warn(str(warning.message))
            else:  # of a library: for the log
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
        display.message(f"The global model is in {directory.model}")
        if config.linger_seconds and not service.stopping:
            display.message(
                f"The run has ended; waits {config.linger_seconds:g} s for learners that come late "
                "(--linger-seconds); Ctrl-C ends it."
            )

    try:
        service.run(leave_model)
    finally:
        over.set()
        watcher.join()
    status = service.status()
    finished = bool(status["state"] == "finished")
    if not finished:
        total = status["total_steps"] or "?"
        display.message(
            f"Stopped before the end of the run, at outer step {status['outer_step']} of {total}.", "yellow"
        )
    return finished


def _port_of_run(directory: RunDirectory, host: str) -> int:
    """Where the learners of the run look for their syncer, if it was told to listen at any free port."""
    address = directory.read_address()
    if address is None:
        return 0
    host_before, port = parse_listen(address)
    return port if host_before == host else 0


def _watch(config: SyncerConfig, directory: RunDirectory, display: Display, over: threading.Event) -> None:
    """Keep the display going, from what the syncer writes down."""
    told = False
    while not over.wait(_REFRESH_SECONDS):
        status = directory.read_status()
        if not told and isinstance(status.get("address"), str):
            told = True
            display.message(join_lines(status["address"], directory, config))
        display.update(status)


def join_lines(address: str, directory: RunDirectory, config: SyncerConfig) -> str:
    """What to run on the learners' machines."""
    host, port = parse_listen(address)
    token_file = shlex.quote(str(directory.token))
    lines = []
    if is_loopback(host):
        lines.append("Run each learner on this machine, its own number each:")
    else:
        if _is_ip(host) and ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines.append("Copy the token to each learner's machine:")
        lines.append(f"  scp {shlex.quote(f'{socket.gethostname()}:{directory.token}')} hf-diloco-token")
        lines.append("and run there, its own number each:")
        token_file = "hf-diloco-token"
    num_shards = config.num_shards or config.expected_learners
    for learner_id in range(min(config.expected_learners, _MOST_JOIN_LINES)):
        lines.append(
            f"  HF_DILOCO_SYNCER={address} HF_DILOCO_LEARNER_ID={learner_id} HF_DILOCO_TOKEN_FILE={token_file} "
            f"HF_DILOCO_NUM_SHARDS={num_shards} accelerate launch --num_processes 1 train.py"
        )
    if config.expected_learners > _MOST_JOIN_LINES:
        lines.append(f"  ... and so on to HF_DILOCO_LEARNER_ID={config.expected_learners - 1}")
    return "\n".join(lines)


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        ConfigError: it is not that.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen {listen!r} is not an address; give host:port, e.g. 0.0.0.0:29600.")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    return ipaddress.ip_address(host).is_loopback if _is_ip(host) else host == "localhost"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _set_up_logging(console: Console, directory: RunDirectory) -> None:
    """A line a merge, to standard output; on a terminal, which shows a table, to a file, and only warnings there."""
    logging.captureWarnings(True)
    root = logging.getLogger()
    handlers: list[logging.Handler] = []
    if console.is_terminal:
        from rich.logging import RichHandler

        handlers.append(RichHandler(logging.WARNING, console=console, show_path=False, markup=False))
        handlers.append(logging.FileHandler(directory.logs / "syncer.log"))
    else:
        handlers.append(logging.StreamHandler(sys.stdout))
    if not console.is_terminal or len(handlers) > 1:
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("hf_diloco").setLevel(logging.INFO)
