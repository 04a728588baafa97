"""A model in a precision for the three kinds of requests that tasks make: likelihoods,
rolling likelihoods, texts.

How texts become tokens is what lm-evaluation-harness does with the models of Hugging
Face, so that both give the same numbers: spaces at the end of a context belong to what
follows, the tokens of a continuation are those that the whole text has beyond its
context's, an empty context is the token that ends a document, and what is too long
loses its beginning.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from scalify_core import asarray
from trainer.errors import UserError
from trainer.models.functional import Params
from trainer.tasks.scoring import Answer, Question, Scorer
from trainer.tasks.writing import LIKELIEST, DecodingParams, Writer
from trainer.workload import TrainTask

if TYPE_CHECKING:
    from trainer.data import Tokenizer


class GenerationRequest(NamedTuple):
    """A request to generate a text.

    Attributes:
      context: the text to continue; empty: a new document.
      until: strings of which the first one to come ends it, and is left out.
      max_new_tokens: tokens at most.
      decoding: how tokens are chosen.
    """

    context: str
    until: tuple[str, ...]
    max_new_tokens: int
    decoding: DecodingParams = LIKELIEST


class EvalModel:
    """A model of a task, in its precision, with a tokenizer. `at` gives it parameters.

    Args:
      task: whose model it is.
      tokenizer: of the parameters.
      batch: sequences at once.
    """

    def __init__(self, task: TrainTask, tokenizer: "Tokenizer", batch: int) -> None:
        self.tokenizer, self.context = tokenizer, task.model.spec.context
        self._score, self._write = Scorer(task, batch), Writer(task, batch)
        self._params: Params = {}
        self._scaling: Any = ()

    def at(self, params: Params, scaling: Any) -> "EvalModel":
        """The same, with the parameters and the scaling of a `TrainState` on one
        device.
        """
        self._params, self._scaling = params, scaling
        return self

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Answer]:
        """Score continuations of contexts. Raises UserError for a continuation without
        a token or with too many.
        """
        return self.answers([self.question(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return log-likelihoods of texts in nats; each token is scored once, with the
        longest context that fits.
        """
        windows = [list(self.windows(text)) for text in texts]
        answers = iter(self.answers([window for some in windows for window in some]))
        return [sum(next(answers).logprob for _ in some) for some in windows]

    def texts(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Generate a text for each request. Raises UserError if `max_new_tokens` leaves
        no room for a context.
        """
        texts: dict[int, str] = {}
        for key in dict.fromkeys(request[1:] for request in requests):
            rows = [row for row, request in enumerate(requests) if request[1:] == key]
            texts |= dict(
                zip(rows, self._written([requests[row] for row in rows]), strict=True)
            )
        return [texts[row] for row in range(len(requests))]

    def question(self, context: str, continuation: str) -> Question:
        """A context and its continuation in tokens."""
        encode = self.tokenizer.encode
        if not context:
            after = encode(continuation)
            if after[:1] == [self.tokenizer.eot]:
                return Question(after[:1], after[1:])
            return Question([self.tokenizer.eot], after)
        stripped = context.rstrip()
        before = encode(stripped)
        after = encode(context + continuation)[len(before) :]
        return Question(before or [self.tokenizer.eot], after)

    def windows(self, text: str) -> Iterator[Question]:
        """A text in parts of a context's length; the last one has the whole context
        before what is left.
        """
        ids, size = [self.tokenizer.eot, *self.tokenizer.encode(text)], self.context
        for start in range(1, len(ids), size):
            end = min(start + size, len(ids))
            first = max(0, end - size - 1)  # as many inputs as fit
            yield Question(ids[first:start], ids[start:end])

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """Score questions in tokens. Raises UserError as `likelihoods` does."""
        for before, after in questions:
            if not before or not 0 < len(after) <= self.context:
                raise UserError(
                    f"a continuation of {len(after)} tokens cannot be scored; expected"
                    f" 1 to {self.context} (model.context); choose another task, or a"
                    " model with a longer context"
                )
        return self._score(self._params, self._scaling, questions)

    def _written(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Generate the texts of requests that differ only in their contexts."""
        _, until, max_new_tokens, decoding = requests[0]
        room = self.context - max_new_tokens
        if room < 1 or max_new_tokens < 1:
            raise UserError(
                f"a task asks for {max_new_tokens} new tokens, the model's context is"
                f" {self.context}; choose another task, or a model with a longer"
                " context"
            )
        tokenizer = self.tokenizer
        prompts = [
            (tokenizer.encode(request.context) or [tokenizer.eot])[-room:]
            for request in requests
        ]
        ended = self._ended(until)
        params = asarray(self._params)
        new = self._write(
            params,
            prompts,
            max_new_tokens=max_new_tokens,
            ended=ended,
            decoding=decoding,
        )
        return [
            before_first(self.decoded(prompt, ids), until)
            for prompt, ids in zip(prompts, new, strict=True)
        ]

    def _ended(self, until: tuple[str, ...]) -> Callable[[list[int]], bool]:
        decode = self.tokenizer.decode
        return lambda ids: (
            self.tokenizer.eot in ids
            or any(mark and mark in decode(ids) for mark in until)
        )

    def decoded(self, prompt: Sequence[int], ids: list[int]) -> str:
        """The text of new ids, up to where the document ends."""
        from trainer.data.tokenizer import continuation

        end = ids.index(self.tokenizer.eot) if self.tokenizer.eot in ids else len(ids)
        return continuation(self.tokenizer, prompt, ids[:end])


def before_first(text: str, marks: Sequence[str]) -> str:
    """The text up to the first of some strings."""
    for mark in marks:
        if mark:
            text = text.split(mark)[0]
    return text
