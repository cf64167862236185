"""The bound on requests in flight over all flow runs and machines, as slots of one global limit of the server."""

from collections.abc import Generator
from contextlib import contextmanager

from prefect import get_client, get_run_logger
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment

from eagle3.errors import ConfigurationError

REQUESTS = "eagle3-requests"
"""Global limit of requests in flight, registered from prefect.yaml."""
LEASE_S = 60.0
"""The shortest lease; slots of a dead process are free this long after its last renewal, and some seconds."""


@contextmanager
def request_slots(in_flight: int) -> Generator[None]:
    """Hold one slot of the global limit for each request that may be under way, in one lease for the whole stage.

    It bounds the requests of all flow runs and machines together; within this run the session's limiter counts. A run
    started by hand, or on a server without the limit, holds none.

    Raises:
        ConfigurationError: The recipe allows more requests in flight than the limit has slots.
    """
    if not deployment.id:
        yield
        return
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(REQUESTS)
        except ObjectNotFound:
            limit = None
    if limit is None or not limit.active:
        yield
        return
    require_slots(in_flight, limit.limit)
    if limit.active_slots + in_flight > limit.limit:
        get_run_logger().info(
            "waiting for %d of %d slots of %r, %d are in use", in_flight, limit.limit, REQUESTS, limit.active_slots
        )
    with concurrency(
        REQUESTS, occupy=in_flight, lease_duration=LEASE_S, strict=True, raise_on_lease_renewal_failure=False
    ):
        yield


def require_slots(in_flight: int, slots: int) -> None:
    """Make sure that a limit can ever hold a run.

    Raises:
        ConfigurationError: The run asks for more slots than there are.
    """
    if in_flight > slots:
        raise ConfigurationError(
            f"generation.in_flight is {in_flight}, the global limit {REQUESTS!r} has {slots} slots: this run could "
            "never start. Lower generation.in_flight, or raise the limit in prefect.yaml and run 'eagle3 deploy'."
        )
