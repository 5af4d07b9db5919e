"""A text as the data of a card: windows of tokens, and the token that follows each."""

from pathlib import Path

import torch

from biascope.reports.panels.examples import EXAMPLES, LEAST, Examples
from biascope.reports.panels.sources import TOKENS, Spec, stored
from biascope.support.errors import InputError
from biascope.support.seeds import generator


def text_examples(spec: Spec, path: str | Path, tokens: int | None = None, seed: int = 0) -> Examples:
    """Windows [n, tokens] of a text file, cut by the tokenizer in the folder of `hf:FOLDER`; y is the next token."""
    folder = stored(spec.removeprefix("hf:")) if isinstance(spec, str) and spec.startswith("hf:") else None
    if folder is None:
        raise InputError("--text needs the tokenizer of the model: name it hf:FOLDER, as save_pretrained wrote it")
    path, length = Path(path), tokens or TOKENS
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {path} cannot be read ({type(error).__name__}: {error})") from error
    ids = torch.tensor(_token_ids(folder, text), dtype=torch.long)
    room = len(ids) - length  # windows that begin at different tokens
    if room < LEAST:
        raise InputError(
            f"--text {path} has {len(ids)} tokens; {LEAST} windows of {length} and the token after each need "
            f"{length + LEAST} or more: a longer text, or --input with fewer tokens"
        )
    starts = torch.arange(0, room, min(length, room // LEAST))
    if len(starts) > EXAMPLES:
        starts = starts[torch.randperm(len(starts), generator=generator(seed, "card text"))[:EXAMPLES].sort().values]
    x = ids[starts[:, None] + torch.arange(length)]
    return Examples(path.name, x, ids[starts + length])


def _token_ids(folder: Path, text: str) -> list[int]:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except ImportError as error:
        raise InputError("--text needs the package transformers: pip install transformers") from error
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{folder} has no tokenizer that can be loaded ({why}): save it there too") from error
