"""Short adapters to other libraries. Nothing else imports them, and each imports its library."""

from typing import Any


def shared_by_ranks(options: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """Return options of a `KeyedCache` with which the ranks of a job share it, for its keys mean the same to all of them.

    A cache that outlasts the job gets no fingerprint: the user has to say which version of the data it has.
    """
    outlasts = not options.keys().isdisjoint(("name", "disk", "fingerprint"))
    return options if outlasts else options | {"fingerprint": fingerprint}
