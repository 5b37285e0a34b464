"""What NVRTC and ptxas say, read: the resources of a kernel that compiles, and the errors of one that does not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tilewise.compiler.spec import KernelSpec


class KernelCompileError(RuntimeError):
    """NVRTC or ptxas refused a kernel; the message has the spec, the architecture and the lines at fault."""


@dataclass(frozen=True)
class ResourceReport:
    """What ptxas says a kernel costs. Spills and stack are bytes per thread, spills those of all functions it calls."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    static_shared: int
    barriers: int
    warnings: tuple[str, ...]
    compile_seconds: float

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0

    @property
    def serialised(self) -> tuple[str, ...]:
        """The warnings that say wgmma lost its overlap."""
        return tuple(w for w in self.warnings if "(C75" in w and "serialized" in w)


_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_WARNING = re.compile(r"^(?:ptxas warning|ptxas .*\(C75\d\d\)|.+\(\d+\): warning).*$", re.M)


def parse(spec: KernelSpec, arch: str, log: str, seconds: float) -> ResourceReport:
    """The report from ptxas -v: a section for each entry, with the functions it calls and could not inline."""
    sections = re.split(r"Compiling entry function '([^']+)'", log)[1:]
    entries = dict(zip(sections[::2], sections[1::2], strict=True))
    if spec.entry not in entries:
        raise KernelCompileError(
            f'{spec} ({arch}): {spec.source} has no extern "C" __global__ {spec.entry}; '
            f"it has {', '.join(entries) or 'none'}"
        )
    section = entries[spec.entry]
    frames = [tuple(map(int, found)) for found in _SPILLS.findall(section)]

    def count(pattern: str) -> int:
        found = re.search(pattern, section)
        return int(found[1]) if found else 0

    return ResourceReport(
        registers=count(r"Used (\d+) registers"),
        spill_stores=sum(f[1] for f in frames),
        spill_loads=sum(f[2] for f in frames),
        stack_bytes=count(r"(\d+) bytes cumulative stack size") or max((f[0] for f in frames), default=0),
        static_shared=count(r"(\d+) bytes smem"),
        barriers=count(r"used (\d+) barriers"),
        warnings=tuple(dict.fromkeys(re.sub(r"\s+", " ", w.strip()) for w in _WARNING.findall(log))),
        compile_seconds=seconds,
    )


_ERROR = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error(?: \S+)?: (?P<what>.*)$")
_PTX_ERROR = re.compile(r"^ptxas .*ptx input, line (?P<line>\d+); (?:error|fatal)\s*: (?P<what>.*)$")


def explain(spec: KernelSpec, arch: str, log: str, sources: dict[str, str], ptx: str) -> str:
    """The errors of a log, each with file, line and the text of that line."""
    errors: dict[str, str] = {}  # an unrolled loop repeats itself
    lines = log.splitlines()
    for number, text in enumerate(lines):
        if found := _ERROR.match(text):
            said = _quote(found["file"], int(found["line"]), found["what"], sources)
            for later in lines[number + 1 :]:
                if not later.strip() or _ERROR.match(later):
                    break
                if "detected during" in later or re.search(r" at line \d+", later):
                    said += f"\n      {later.strip()}"
            errors[said] = ""
        elif found := _PTX_ERROR.match(text):
            said, instruction = _quote_ptx(ptx, int(found["line"]), found["what"], sources)
            errors.setdefault(said, instruction)
        elif text.startswith("ptxas fatal") and "aborted due to errors" not in text:
            errors[text] = ""
    if not errors:
        errors[log.strip() or "NVRTC gave no reason"] = ""
    shown = [f"  {said}{instruction}" for said, instruction in errors.items()]
    if len(shown) > 10:
        shown[10:] = [f"  and {len(shown) - 10} more errors"]
    if re.search(r'"(crt/)?mma\.h"', log):
        shown.append("  wmma needs CUDA's crt headers: pip install nvidia-cuda-crt")
    return "\n".join([f"{spec} does not compile for {arch}:", *shown])


def _quote(file: str, line: int, what: str, sources: dict[str, str]) -> str:
    try:
        text = sources[file] if file in sources else Path(file).read_text(encoding="utf-8", errors="replace")
        return f"{file}:{line}: {what}\n    {text.splitlines()[line - 1].strip()}"
    except (OSError, IndexError):
        return f"{file}:{line}: {what}"


def _quote_ptx(ptx: str, line: int, what: str, sources: dict[str, str]) -> tuple[str, str]:
    """An error at a line of PTX: where in the source it comes from, and the instruction."""
    lines = ptx.splitlines()[:line]
    if len(lines) < line:
        return f"PTX line {line}: {what}", ""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M))
    # NVRTC writes a file given in memory as if it lay in the working folder.
    files = {n: next((s for s in sources if file == s or file.endswith("/" + s)), file) for n, file in files.items()}
    places = re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+))?", "\n".join(lines), re.M)
    instruction = f"\n      PTX: {lines[-1].strip()}"
    if not places or places[-1][0] not in files:
        return what, instruction
    file, number, caller, caller_number = places[-1]
    if caller in files:
        instruction += f"\n      inlined at {files[caller]}:{caller_number}"
    return _quote(files[file], int(number), what, sources), instruction
