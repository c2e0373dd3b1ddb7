"""The API's routes: what is checked in which order, and what is written in one transaction.

Checks run in this order: 401 headers, 429 rate, 422 body, 403 another hotkey, 401 body signature,
404 unregistered, 403 banned, 409. Every error is `{"detail": ...}`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from neurons import protocol, rules
from neurons.observe import get_logger
from neurons.validator_api import auth, bans, rounds, stats, submissions
from neurons.validator_api.config import ApiConfig
from neurons.validator_api.middleware import AccessLog, BodyLimit
from neurons.validator_api.storage import Storage

log = get_logger("validator_api")
router = APIRouter()


def create_app(config: ApiConfig) -> FastAPI:
    """Return the API over the database that `config` names.

    Raises:
        ConfigError: the database cannot be opened.
    """
    storage = Storage(config.database_url)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        storage.close()

    app = FastAPI(title="QUASAR validator API", lifespan=lifespan)
    app.state.config = config
    app.state.storage = storage
    app.state.limiter = auth.RateLimiter(config.rate_limit, config.clock)
    app.add_middleware(BodyLimit, limit=config.max_body_bytes)
    app.add_middleware(AccessLog)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)
    app.include_router(router)
    return app


def _config(request: Request) -> Any:
    return request.app.state.config


def _storage(request: Request) -> Any:
    return request.app.state.storage


Config = Annotated[ApiConfig, Depends(_config)]
Database = Annotated[Storage, Depends(_storage)]
ClientIp = Annotated[str, Depends(auth.client_ip)]


def _invalid(_: Request, error: Exception) -> JSONResponse:
    """Answer 422 without repeating the input: it may hold a salt or a signature, or be NaN."""
    assert isinstance(error, RequestValidationError)  # noqa: S101 — registered for this type only
    problems = [
        {"type": item["type"], "loc": list(item["loc"]), "msg": item["msg"]}
        for item in error.errors()
    ]
    return JSONResponse({"detail": problems}, status_code=422)


def _unexpected(_: Request, error: Exception) -> JSONResponse:
    log.error("request failed", exc_info=error)
    return JSONResponse({"detail": "Internal server error"}, status_code=500)


@router.get("/health")
def health() -> dict[str, str]:
    """Tell that the server answers."""
    return {"status": "ok"}


@router.post("/register_miner")
def register_miner(
    body: protocol.RegisterRequest, hotkey: auth.Hotkey, config: Config, storage: Database
) -> protocol.RegisterReply:
    """Register the calling hotkey for a model and a league."""
    auth.check_same_hotkey(body.hotkey, hotkey)
    leagues = [league for _, league, _ in rules.LEAGUES]
    if body.league not in leagues:
        raise HTTPException(400, f"Invalid league. Must be one of: {', '.join(leagues)}")
    return storage.write(lambda session: submissions.register(session, body, config.now()))


@router.post("/submit_kernel")
def submit_kernel(
    hotkey: auth.LimitedHotkey,
    body: protocol.SubmitRequest,
    ip: ClientIp,
    config: Config,
    storage: Database,
) -> protocol.SubmitReply:
    """Take a submission without commit and reveal."""
    auth.check_same_hotkey(body.miner_hotkey, hotkey)
    auth.check_signed(hotkey, body.signature, *auth.signed_texts(body))
    return storage.write(lambda session: submissions.submit(session, body, ip, config.now()))


@router.post("/commit_submission")
def commit_submission(
    hotkey: auth.LimitedHotkey,
    body: protocol.CommitRequest,
    ip: ClientIp,
    config: Config,
    storage: Database,
) -> protocol.CommitReply:
    """Take a commitment to a fork whose address stays hidden until the reveal."""
    auth.check_same_hotkey(body.miner_hotkey, hotkey)
    auth.check_signed(hotkey, body.signature, body.commitment_hash)
    return storage.write(lambda session: submissions.commit(session, body, ip, config))


@router.post("/reveal_submission")
def reveal_submission(
    hotkey: auth.Hotkey,
    body: protocol.RevealRequest,
    ip: ClientIp,
    config: Config,
    storage: Database,
) -> protocol.RevealReply:
    """Open a commitment."""
    auth.check_same_hotkey(body.miner_hotkey, hotkey)
    auth.check_signed(hotkey, body.signature, *auth.signed_texts(body))
    try:
        return storage.write(lambda session: submissions.reveal(session, body, config))
    except submissions.CommitmentMismatch:
        storage.write(lambda session: bans.record_failure(session, ip, config.now()))
        raise


@router.get("/pending_reveals")
def pending_reveals(config: Config, storage: Database) -> protocol.PendingReveals:
    """List the commitments that wait for their reveal, and the server's block."""
    with storage.read() as session:
        return submissions.pending_reveals(session, config)


@router.get("/get_submission_stats")
def get_submission_stats(
    request: Request, storage: Database, limit: Annotated[int, Query(ge=1, le=100)] = 50
) -> protocol.SubmissionStats:
    """List what validators have not judged yet, newest first, and the verdicts."""
    with storage.read() as session:
        return stats.submission_stats(session, limit, auth.from_validator(request))


@router.get("/verification_stats")
def verification_stats(storage: Database, round_id: protocol.RowId | None = None) -> dict[str, Any]:
    """Count the logit verifications."""
    with storage.read() as session:
        return stats.verification_stats(session, round_id)


@router.get("/get_submission_rate")
def get_submission_rate(
    config: Config,
    storage: Database,
    window_minutes: Annotated[int, Query(ge=1, le=60 * 24 * 366)] = 10,
) -> dict[str, Any]:
    """Count the submissions of the last minutes."""
    with storage.read() as session:
        return stats.submission_rate(session, window_minutes, config.now())


@router.post("/mark_validated")
def mark_validated(
    _: auth.ValidatorHotkey, body: protocol.MarkValidatedRequest, config: Config, storage: Database
) -> dict[str, Any]:
    """Store a validator's score of a submission."""
    return storage.write(lambda session: submissions.mark_validated(session, body, config.now()))


@router.post("/record_verification")
def record_verification(
    _: auth.ValidatorHotkey, storage: Database, found: Annotated[protocol.Verification, Query()]
) -> dict[str, Any]:
    """Store the outcome of a logit verification."""
    return storage.write(lambda session: submissions.record_verification(session, found))


@router.post("/record_failure")
def record_failure(
    _: auth.ValidatorHotkey, body: protocol.FailureRequest, config: Config, storage: Database
) -> dict[str, str]:
    """Count a failed validation against the address it was sent from."""
    storage.write(lambda session: bans.record_failure(session, body.ip_address, config.now()))
    return {"status": "ok", "ip_address": body.ip_address, "message": "Failure recorded"}


@router.get("/get_current_round")
def get_current_round(config: Config, storage: Database) -> protocol.Round:
    """Show the active round; open the next one when there is none."""
    now = config.now()
    return storage.write(
        lambda session: rounds.as_message(session, rounds.current(session, now), now)
    )


@router.post("/create_round")
def create_round(
    _: auth.ValidatorHotkey, body: protocol.CreateRoundRequest, config: Config, storage: Database
) -> protocol.Round:
    """End the active round and open the next one."""
    now = config.now()
    return storage.write(
        lambda session: rounds.as_message(session, rounds.create(session, body, now), now)
    )


@router.post("/finalize_round/{round_id}")
def finalize_round(
    round_id: protocol.RowId, _: auth.ValidatorHotkey, storage: Database
) -> dict[str, Any]:
    """End a round and name its winner."""
    return storage.write(lambda session: rounds.finalize_by_id(session, round_id))


@router.get("/get_weights")
def get_weights(
    config: Config, storage: Database, round_id: protocol.RowId | None = None
) -> protocol.Weights:
    """Show the shares of a round, by default of the last completed one."""
    with storage.read() as session:
        return protocol.Weights(
            epoch=int(config.clock()), weights=rounds.weights(session, round_id)
        )
