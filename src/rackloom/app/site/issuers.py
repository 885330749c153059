"""Bearer tokens of the issuers that the site trusts, and when their signing keys are read.

The issuer that an unverified token claims decides only which keys are tried. A token verifies only with the
keys, the audiences and the claim mapping of that issuer. Subjects are qualified with it.

Keys are read at the start and then on a timer (`refresh`). A token with an unknown key id triggers an earlier
reading, as a provider may have rotated its keys: at most once in `ASKED_SECONDS` for each issuer, by the
same background job. The request itself never waits for another server. It is answered 503 while keys are
being read on its behalf, and 401 afterwards. So a flood of made-up key ids causes two reads a minute.

A provider that cannot be reached, or that answers with something else than a key set, has not revoked its
keys: those read last stay in use, and the next attempt follows after `RETRY_SECONDS`. A key set in which no
key can be used withdraws the old ones: the tokens of the issuer are answered 401. `doubts` and `key_age` are
for operators. While the keys of an issuer were never read, its tokens are neither valid nor invalid: 503.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import jwt
import structlog

from rackloom.app.config import IssuerConfig
from rackloom.app.site.provider_keys import NoUsableKeys, read_keys
from rackloom.carve.api.auth import Caller, TokenVerifier, TrustedKey, UnknownKey
from rackloom.carve.observation.latest import rfc3339
from rackloom.errors import Retry

log = structlog.get_logger(__name__)

RETRY_SECONDS = 10.0
ASKED_SECONDS = 30.0
"""Between a reading of keys and one that an unknown key id triggers."""
MAX_REASON = 300
"""Characters of a reason why keys could not be read: a provider chooses parts of it."""


class _Issuer:
    """An issuer, its verifier, and the state of its keys."""

    def __init__(self, config: IssuerConfig) -> None:
        self.config = config
        self.verifier: TokenVerifier | None = None
        self.read_at: float | None = None
        self.tried_at = float("-inf")
        self.failure: str | None = None
        self.asked = asyncio.Event()

    def ask(self, now: float) -> bool:
        """Request a reading because of an unknown key id. Return whether there will be one soon."""
        if now - self.tried_at >= ASKED_SECONDS:
            self.asked.set()
        return self.asked.is_set()

    async def until_due(self) -> None:
        """Return when the keys shall be read again."""
        seconds = self.config.refresh.total_seconds()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds if self.failure is None else min(seconds, RETRY_SECONDS)):
                await self.asked.wait()


class IssuerVerifier(TokenVerifier):
    """Verifies tokens of all configured issuers, each only with its own keys and audiences."""

    def __init__(self, issuers: Sequence[IssuerConfig], clock: Callable[[], float]) -> None:
        # It has no keys itself, and refuses a token of an unknown issuer with the usual message.
        super().__init__([], issuer="", audience="", clock=clock)
        self._issuers = {issuer.issuer: _Issuer(issuer) for issuer in issuers}

    def verify(self, authorization: str | None, org: str) -> Caller:
        """As `TokenVerifier.verify`. Raises Retry as long as the keys of the token may not be known yet."""
        issuer = self._issuers.get(_claimed_issuer(authorization))
        if issuer is None:
            return super().verify(authorization, org)
        if issuer.verifier is None:
            raise Retry("The keys of the issuer of the token could not be read yet", after=RETRY_SECONDS)
        try:
            return issuer.verifier.verify(authorization, org)
        except UnknownKey:
            if issuer.ask(self._clock()):
                raise Retry("The key of the token is not known yet", after=1.0) from None
            raise

    async def load(self) -> None:
        """Read the keys of every issuer once. Keys that cannot be read are left to `refresh`."""
        await asyncio.gather(*(self._load(issuer) for issuer in self._issuers.values()))

    async def refresh(self) -> None:
        """Read the keys of every issuer whenever they are due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for issuer in self._issuers.values():
                tasks.create_task(self._refresh(issuer))

    def doubts(self) -> dict[str, str]:
        """The issuers with keys that could not be read when they were due, each with the reason."""
        found = {}
        for name, issuer in sorted(self._issuers.items()):
            if issuer.failure is not None:
                last = "never" if issuer.read_at is None else f"last at {rfc3339(issuer.read_at)}"
                found[name] = f"keys were read {last}: {issuer.failure}"
        return found

    def key_age(self, name: str) -> float:
        """Seconds since the keys of an issuer were read. Infinite if they never were."""
        read_at = self._issuers[name].read_at
        return float("inf") if read_at is None else max(0.0, self._clock() - read_at)

    async def _refresh(self, issuer: _Issuer) -> None:
        while True:
            await issuer.until_due()
            await self._load(issuer)

    async def _load(self, issuer: _Issuer) -> None:
        issuer.tried_at = self._clock()
        try:
            self._trust(issuer, await read_keys(issuer.config))
            issuer.failure = None
        except Exception as error:
            # A provider's answer must never end the service.
            if isinstance(error, NoUsableKeys):
                self._trust(issuer, [])
            issuer.failure = (str(error) or type(error).__name__)[:MAX_REASON]
            log.warning("auth.keys-not-read", issuer=issuer.config.issuer, reason=issuer.failure)
        finally:
            issuer.asked.clear()

    def _trust(self, issuer: _Issuer, keys: Sequence[TrustedKey]) -> None:
        """Verify with `keys`, read now, and with no others."""
        config = issuer.config
        issuer.read_at = self._clock()
        issuer.verifier = TokenVerifier(
            keys,
            issuer=config.issuer,
            audience=config.all_audiences,
            clock=self._clock,
            lifetime=config.max_token_lifetime.total_seconds(),
            mapping=config.claim_mapping,
            qualifier=f"{config.issuer}#",
        )


def _claimed_issuer(authorization: str | None) -> str:
    """The issuer that the token claims, unverified, or empty if it claims none."""
    token = (authorization or "").partition(" ")[2].strip()
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, RecursionError):
        return ""
    return str(claims.get("iss", ""))
