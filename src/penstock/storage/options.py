"""Options of a remote store, as one value that is pickled with the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Settings that override the usual sources (environment, profile files, instance).

    The defaults suit most users: set nothing here, and use the environment.
    """

    endpoint: str | None = None
    """Address of an S3-compatible server or Azure endpoint; plain http is allowed if it says so."""
    region: str | None = None
    """Region of the bucket; else AWS_REGION, the profile, us-east-1."""
    anonymous: bool = False
    """Send no credentials, for public buckets."""
    path_style: bool | None = None
    """`endpoint/bucket/key` instead of `bucket.endpoint/key`; None: where an endpoint is given."""
    profile: str | None = None
    """Section of ~/.aws/credentials and ~/.aws/config; else AWS_PROFILE, "default"."""
    access_key: str | None = None
    """Key id; better left to the environment or a profile."""
    secret_key: str | None = field(default=None, repr=False)
    """The secret beside `access_key`."""
    session_token: str | None = field(default=None, repr=False)
    """The third part of temporary credentials."""
    timeout_s: float = 30.0
    """Longest silence of the store within one request."""
    deadline_s: float = 120.0
    """Longest time for one call with all its retries."""

    def __post_init__(self) -> None:
        if (self.access_key is None) != (self.secret_key is None):
            given, missing = ("access_key", "secret_key")[:: 1 if self.access_key else -1]
            raise OptionError(f"{given} is given without {missing}; pass both or neither")
        if self.anonymous and (self.access_key or self.profile):
            raise OptionError("anonymous=True and credentials exclude each other; drop one of them")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise OptionError(
                f"endpoint {self.endpoint!r} must start with http:// or https://, "
                f"for example https://{self.endpoint}"
            )
        if not 0 < self.timeout_s <= self.deadline_s:
            raise OptionError(
                f"timeout_s must lie between 0 and deadline_s ({self.deadline_s:g}), "
                f"got {self.timeout_s:g}"
            )
