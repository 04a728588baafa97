"""A model in a precision that answers tasks' requests: likelihoods and generations.

Texts become tokens as in lm-evaluation-harness for models of Hugging Face, so that both
give the same numbers: trailing spaces of a context belong to the continuation; the
tokens of a continuation are those that the full text has beyond its context's; what is
too long loses its start. An empty context is the end-of-document token, where the
harness takes the tokenizer's bos token, if there is one.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from scalify_core import asarray
from trainer.errors import UserError
from trainer.models.model_functions import Params
from trainer.tasks.scoring import Answer, Question, Scorer
from trainer.tasks.writing import LIKELIEST, DecodingParams, Writer
from trainer.workload import TrainTask

if TYPE_CHECKING:
    from trainer.data import Tokenizer


class GenerationRequest(NamedTuple):
    """A request to generate a text.

    Attributes:
      context: the text to continue; empty: a new document.
      until: stop strings; the first one ends the text and is left out.
      max_new_tokens: tokens at most.
      decoding: the choice of tokens.
    """

    context: str
    until: tuple[str, ...]
    max_new_tokens: int
    decoding: DecodingParams = LIKELIEST


class EvalModel:
    """A task's model in its precision, with a tokenizer. `at` sets its parameters.

    Args:
      task: the model and its precision.
      tokenizer: of the parameters.
      batch: sequences at once.
    """

    def __init__(self, task: TrainTask, tokenizer: "Tokenizer", batch: int) -> None:
        self.tokenizer, self.context = tokenizer, task.model.spec.context
        self._score, self._write = Scorer(task, batch), Writer(task, batch)
        # Set anew for each checkpoint; the compiled programs stay.
        self._params: Params = {}
        self._scaling: Any = ()

    def at(self, params: Params, scaling: Any) -> "EvalModel":
        """Set a `TrainState`'s parameters and scaling on one device; return self."""
        self._params, self._scaling = params, scaling
        return self

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Answer]:
        """Score continuations of contexts.

        Raises:
          UserError: a continuation without a token, or longer than the context.
        """
        return self.answers([self.question(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return log-likelihoods of texts in nats.

        Each token is scored once, with the longest context that fits.
        """
        windows = [list(self.windows(text)) for text in texts]
        answers = iter(self.answers(list(itertools.chain(*windows))))
        return [sum(next(answers).logprob for _ in parts) for parts in windows]

    def texts(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Generate a text for each request.

        Raises:
          UserError: `max_new_tokens` leaves no room for a context.
        """
        texts: dict[int, str] = {}
        # A batch is written by one choice of tokens, up to one length.
        for settings in dict.fromkeys(request[1:] for request in requests):
            rows = [i for i, request in enumerate(requests) if request[1:] == settings]
            generated = self._generate([requests[row] for row in rows])
            texts |= dict(zip(rows, generated, strict=True))
        return [texts[row] for row in range(len(requests))]

    def check_fits(self, context: str, continuation: str) -> None:
        """Raise UserError for a continuation that `likelihoods` refuses."""
        self.question(context, continuation)

    def question(self, context: str, continuation: str) -> Question:
        """Return a context and its continuation in tokens; UserError as in
        `likelihoods`.
        """
        encode, eot = self.tokenizer.encode, self.tokenizer.eot
        context_ids = encode(context.rstrip()) if context else []
        # Encoded together: a token may hold the end of the context and the start of the
        # continuation, and the model was trained on such tokens.
        ids = encode(context + continuation)[len(context_ids) :]
        if not 0 < len(ids) <= self.context:
            raise UserError(
                f"a continuation of {len(ids)} tokens cannot be scored; expected 1 to"
                f" {self.context} (model.context); choose another task, or a model with"
                " a longer context"
            )
        return Question(context_ids or [eot], ids)

    def windows(self, text: str) -> Iterator[Question]:
        """Yield a text in parts of a context's length.

        The last part has the full context before it.
        """
        ids, size = [self.tokenizer.eot, *self.tokenizer.encode(text)], self.context
        # From 1: the end-of-document token before the text is not scored.
        for start in range(1, len(ids), size):
            end = min(start + size, len(ids))
            first = max(0, end - size - 1)  # as many inputs as fit
            yield Question(ids[first:start], ids[start:end])

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """Score questions in tokens."""
        return self._score(self._params, self._scaling, questions)

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Generate the texts of requests that differ only in their contexts."""
        _, until, max_new_tokens, decoding = requests[0]
        room = self.context - max_new_tokens
        if room < 1 or max_new_tokens < 1:
            raise UserError(
                f"a task asks for {max_new_tokens} new tokens, the model's context is"
                f" {self.context}; choose another task, or a model with a longer"
                " context"
            )
        decode, encode = self.tokenizer.decode, self.tokenizer.encode
        eot = self.tokenizer.eot
        # Like the harness, drop the start of a context that is too long.
        prompts = [(encode(request.context) or [eot])[-room:] for request in requests]

        def ended(ids: list[int]) -> bool:
            # A stop string may lie across several tokens, and every text contains an
            # empty one.
            return eot in ids or any(mark and mark in decode(ids) for mark in until)

        new = self._write(
            asarray(self._params),
            prompts,
            max_new_tokens=max_new_tokens,
            ended=ended,
            decoding=decoding,
        )
        return [
            before_first(self.decoded(prompt, ids), until)
            for prompt, ids in zip(prompts, new, strict=True)
        ]

    def decoded(self, prompt: Sequence[int], ids: list[int]) -> str:
        """Return the text of new ids, up to the end of the document."""
        from trainer.data.tokenizer import continuation

        end = ids.index(self.tokenizer.eot) if self.tokenizer.eot in ids else len(ids)
        return continuation(self.tokenizer, prompt, ids[:end])


def before_first(text: str, marks: Sequence[str]) -> str:
    """Return the text before the first of some strings."""
    for mark in marks:
        # `split` refuses an empty separator.
        if mark:
            text = text.split(mark)[0]
    return text
