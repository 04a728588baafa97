"""What a run says of itself to a reader: the page, its charts and verdicts, and several
runs compared.

It reads run directories only, but for `messages`, what a run prints at its start and
end.
"""
