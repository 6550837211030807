"""The program that renders chat templates in a separate process, because a template is code from the internet.

`chat_template.Renderer` starts this file as a script. The script imports only Jinja2 and the standard library, and runs
templates in Jinja's `ImmutableSandboxedEnvironment`, with the helpers that transformers provides. The operating system
enforces what the sandbox cannot: a signal ends the process if a job takes `CPU_SECONDS`, and the memory and files of
the process are limited. The first line of the input holds the template; each further line holds a list of jobs. The
program writes one line for the template, and one line for each job.
"""

import contextlib
import datetime
import json
import sys
from collections.abc import Callable
from typing import Any, ClassVar

CPU_SECONDS = 5.0
"""CPU seconds that the renderings of one job may take; a usual job takes less than a millisecond."""
MAX_CHARACTERS = 2**23
"""Number of characters of the longest text that a template may render."""
MEMORY_BYTES = 2**31
"""Limit of the process's address space, in bytes; macOS does not enforce it."""


def limit_process() -> None:
    """Limit the memory of this process, and keep it from writing files."""
    import resource

    for resource_kind, limit_bytes in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0)):
        with contextlib.suppress(OSError, ValueError):  # the system has a lower limit, or no limit of this kind
            resource.setrlimit(resource_kind, (limit_bytes, limit_bytes))


def start_clock(seconds: float) -> None:
    """Start a clock that ends this process by a signal after `seconds` of CPU time; 0 stops the clock.

    No handler is installed, because it would run only after the operation in progress, which may itself be endless.
    """
    import signal

    signal.setitimer(signal.ITIMER_PROF, seconds)


def compiled_template(source: str, date: str | None) -> Any:
    """Return a compiled template.

    Args:
        source: text of the template.
        date: day that `strftime_now` reports, as YYYY-MM-DD; `None` for the present time.
    """
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """The tag `generation`, which encloses the text of an assistant; its body is rendered like any other text."""

        tags: ClassVar[set[str]] = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride]

        def parse(self, parser: Any) -> Any:
            line_number = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line_number)

    class Namespace(jinja2.utils.Namespace):
        """A namespace without names that begin with an underscore, as in transformers."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"the namespace attribute {name!r} begins with an underscore")
            super().__setitem__(name, value)

    def strftime_now(format_text: str) -> str:
        moment = datetime.datetime.now() if date is None else datetime.datetime.fromisoformat(date)
        return moment.strftime(format_text)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """Return a value as JSON, without the HTML escapes of Jinja's own filter."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": strftime_now,
        "namespace": Namespace,
        "dict": lambda *entries, **named: dict(*entries, **named),  # the type itself has methods to misuse
    }
    return environment.from_string(source)


class RaisedError(Exception):
    """The template itself refused the messages, by `raise_exception`."""


def _raise(message: Any) -> None:
    """Raise the error by which a template refuses messages; templates call this as `raise_exception`."""
    raise RaisedError(str(message))


def rendered_text(template: Any, variables: dict[str, Any]) -> str:
    """Return the text that a compiled template renders.

    Raises:
        ValueError: the text has more than `MAX_CHARACTERS` characters.
    """
    pieces, character_count = [], 0
    for piece in template.generate(**variables):
        character_count += len(piece)
        if character_count > MAX_CHARACTERS:
            raise ValueError(f"it renders more than {MAX_CHARACTERS:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def answer(make_texts: Callable[[], Any]) -> dict[str, Any]:
    """Call `make_texts` within the time limit, and return a dict of its texts or of an error message.

    The key is "texts" for the texts, "raised" if the template refuses the messages, and "broken" for other errors.
    """
    start_clock(CPU_SECONDS)
    try:
        return {"texts": make_texts()}
    except RaisedError as error:
        return {"raised": str(error)}
    except MemoryError:
        return {"broken": "it needs too much memory"}
    except Exception as error:
        line_number = getattr(error, "lineno", None)
        line_text = "" if line_number is None else f" in line {line_number}"
        return {"broken": f"{type(error).__name__}{line_text}: {error}"[:1000]}
    finally:
        start_clock(0)


def main() -> None:
    """Read jobs from standard input, line by line, and write a reply to each, until the input ends."""
    limit_process()
    request = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = request["path"]
    templates: list[Any] = []

    def compile_source() -> list[str]:
        templates.append(compiled_template(request["source"], request["date"]))
        return []

    def reply(answer_json: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(answer_json) + "\n")
        sys.stdout.flush()

    reply(answer(compile_source))
    while line := sys.stdin.buffer.readline():
        for job in json.loads(line):

            def render(job: dict[str, Any] = job) -> list[str]:
                """Render the first messages of a job, once for each of its renderings."""
                shared_variables = {**request["variables"], "tools": job["tools"], "documents": None}
                return [
                    rendered_text(
                        templates[0],
                        {
                            **shared_variables,
                            "messages": job["messages"][:count],
                            "add_generation_prompt": asks_for_answer,
                        },
                    )
                    for count, asks_for_answer in job["renderings"]
                ]

            reply(answer(render))


if __name__ == "__main__":
    main()
