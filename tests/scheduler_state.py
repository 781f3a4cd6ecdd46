"""What a scheduler and its page pool hold, read from their own fields."""

from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler


def has_unfinished(scheduler: Scheduler) -> bool:
    """Whether any request waits or runs."""
    return bool(scheduler.requests.by_id)


def ref_count(pool: PagePool, page: int) -> int:
    """How many sequences hold `page`."""
    return pool._ref_counts[page]


def hash_of(pool: PagePool, page: int) -> bytes | None:
    """The hash by which `page` may be hit, None if it may not."""
    return pool._hashes[page]
