"""The wire messages: one table, msgpack-encoded (`codec.py`), nothing pickled.

Three conversations share one encoding and one session layer:

* sessions: two processes learn each other's epoch (`Hello`, `Welcome`, `Confirm`, `Ping`, `Pong`);
* the hand-off between a decode rank D and a prefill rank P (`Request`, `Offer` ... `Tainted`);
* legs between the router and a worker (`Register`, `Start` ... `Ended`).

Every hand-off message names (transfer id, D rank, P rank, P epoch); D means the P epoch it is *for*, P its own.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quiesce.core.fingerprint import Fingerprint, Limits

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of every wire message. The class name is the tag."""


# ---------------------------------------------------------------- identity


class TransferId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Minted by the decode engine before any address leaves it; never reused."""

    epoch: int  # of the minting process: 64 random bits, drawn at start
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch:016x}.{self.seq}"


class Leg(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One (transfer, lender rank, borrower rank, borrower epoch): the address of every hand-off message."""

    tid: TransferId
    d_rank: int
    p_rank: int
    p_epoch: int

    def __str__(self) -> str:
        return f"{self.tid}/d{self.d_rank}/p{self.p_rank}@{self.p_epoch:016x}"


# ---------------------------------------------------------------- sessions


class Hello(Message, frozen=True):
    epoch: int
    rank: int
    challenge: int
    version_min: int
    version_max: int
    fingerprint: Fingerprint
    descriptor: bytes  # the transport's own, opaque here


class Welcome(Message, frozen=True):
    epoch: int
    rank: int
    echo: int
    challenge: int
    version: int
    fingerprint: Fingerprint
    descriptor: bytes = b""  # pull: of the source, as in `Hello`


class Confirm(Message, frozen=True):
    epoch: int
    rank: int
    echo: int


class Unwelcome(Message, frozen=True):
    """HELLO refused: `reason` names the field that differs."""

    epoch: int
    echo: int
    reason: str


class Ping(Message, frozen=True):
    """`progress`: the engine loop's steps. `counter, high, open_seqs`: the closed set of this decode rank; every seq
    up to `high` that is not listed is closed for ever (guards N5, N9). `reading`: pulls under way (guard N10)."""

    epoch: int
    rank: int
    progress: int
    counter: int
    high: int
    open_seqs: list[int]
    reading: tuple[int, ...] = ()


class Pong(Message, frozen=True):
    epoch: int
    rank: int
    progress: int


class Await(Message, frozen=True):
    """D -> P under `--reserve late`: say when your queue has reached this room. A hint, lends nothing."""

    room: int


class Reached(Message, frozen=True):
    room: int


# ---------------------------------------------------------------- the hand-off


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Pages a borrower may write (push) or read (pull), in logical order, under one generation."""

    region: int
    generation: int
    pages: tuple[int, ...]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities as the model gave them, before temperature, penalties and cuts."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), best first


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """What rides in DONE (in pull: in OFFER) of the designated rank: everything decode needs besides KV."""

    token: int
    cached_tokens: int = 0
    logprob: TokenLogprob | None = None


class Request(Message, frozen=True):
    """Pull, D -> P: compute this prompt and lend its pages. Fields as in `Offer`."""

    leg: Leg
    room: int
    pairing: bytes
    tokens: int
    prefix: int
    remaining_ms: int


class Offer(Message, frozen=True):
    """Pages lent: D's to be written (push, D -> P), or P's to be read (pull, P -> D)."""

    leg: Leg
    room: int
    pairing: bytes  # digest of (token ids, model, adapter, tenant salt)
    grant: Grant
    tokens: int  # valid slots P must fill or has filled, counted from `prefix`
    prefix: int  # tokens D already holds
    remaining_ms: int
    result: FirstToken | None = None  # pull: of the designated rank


class Accept(Message, frozen=True):
    leg: Leg
    place: int  # requests ahead in P's queue


class Refused(Message, frozen=True):
    leg: Leg
    reason: Literal["wrong epoch", "closed", "ended", "full", "unknown epoch"]


class Done(Message, frozen=True):
    leg: Leg
    pages: int
    tokens: int
    digest: bytes | None = None
    result: FirstToken | None = None


class Failed(Message, frozen=True):
    leg: Leg
    reason: str


class Ack(Message, frozen=True):
    leg: Leg


class Check(Message, frozen=True):
    """Pull, D -> P, said after the last read was placed: is this grant still in force? `nonce` is of this question,
    so that an answer to an earlier one is none (guard L10)."""

    leg: Leg
    nonce: int


class Standing(Message, frozen=True):
    """Pull, P -> D: what `Check` asked for, looked at after it was heard."""

    leg: Leg
    nonce: int
    generation: int | None  # under which the pages are lent at this moment; None: they are not


class Abort(Message, frozen=True):
    leg: Leg
    reason: str


class Drained(Message, frozen=True):
    leg: Leg


class NeverStarted(Message, frozen=True):
    leg: Leg


class Busy(Message, frozen=True):
    leg: Leg
    posts: int
    oldest_ms: int = 0


class Tainted(Message, frozen=True):
    leg: Leg


# ---------------------------------------------------------------- router <-> worker


class Address(msgspec.Struct, frozen=True):
    """Where a worker's control socket listens, fresh per epoch, and the key it proves itself with."""

    name: str
    epoch: int
    endpoint: str
    public_key: str  # z85


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn. Penalties count the answer's tokens, `repetition_penalty` the prompt's too."""

    max_tokens: int
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report for each token; 0: the token's own only
    prompt_logprobs: int | None = None
    grammar: str = ""  # what the answer must be, in the grammar library's own notation; empty: anything


class Register(Message, frozen=True):
    """Worker -> router, repeated as a heartbeat. `progress` stands still when the engine loop does; `step` says, for
    people, what computes."""

    role: Literal["prefill", "decode", "colocated"]
    address: Address
    fingerprint: Fingerprint
    limits: Limits
    progress: int
    queued: int
    running: int
    waiting_tokens: int = 0  # prompt tokens that are still to be computed here, or to arrive
    draining: bool = False  # takes no new work
    local_prefill: bool = False  # a decode worker that computes prompts of its own when asked to
    step: str = ""
    cautions: tuple[str, ...] = ()  # for operators: what makes this worker less safe than the default is
    agreed: int = 0  # the limit by which it refuses, as the router last told it; 0: its own alone
    transfers: tuple[str, ...] = ()  # for people: which transfer engine it has with its peers, and why


class Registered(Message, frozen=True):
    """`limit`: tokens of prompt and answer that every worker which this one could be paired with can take, itself
    included (guard D3); 0: there is none yet."""

    router_epoch: int
    limit: int = 0


class Exited(Message, frozen=True):
    """Supervisor -> router: the worker process of this epoch is dead and reaped."""

    name: str
    epoch: int


class Start(Message, frozen=True):
    """One leg of a request. `rid` is minted by the router and pairs nothing by itself; `room` pairs legs."""

    rid: str
    router_epoch: int
    room: int
    token_ids: tuple[int, ...]
    sampling: Sampling
    deadline_ms: int
    prefill: Address | None = None  # on decode legs
    salt: str = ""
    priority: int = 0  # lower is served first and retracted last
    group: str = ""  # samples of one prompt share it, and prefill computes the prompt once for them
    tenant: str = ""  # whose budgets it uses; a label that the router sets, never the client
    resumed: int = 0  # so many of the last `token_ids` are an answer that another worker began
    local: bool = False  # a decode leg without a hand-off: it computes the prompt itself
    probe: bool = False  # a test of this worker alone, over the null transport


class Cancel(Message, frozen=True):
    rid: str
    reason: str


class Tokens(Message, frozen=True):
    rid: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token when they were asked for


class Drawn(Message, frozen=True):
    """What one step drew for several answers of a router, a token each: as many `Tokens` in one message."""

    rids: tuple[str, ...]
    token_ids: tuple[int, ...]


class PromptLogprobs(Message, frozen=True):
    """From the worker that computed the prompt, in order; None for the very first token."""

    rid: str
    first: int  # position of the first one here
    logprobs: tuple[TokenLogprob | None, ...]


Whose = Literal["", "self", "peer", "router"]


class Ended(Message, frozen=True):
    """The one last word on a leg. `status` is the HTTP status a client should see if nothing was sent yet."""

    rid: str
    outcome: Literal["stop", "length", "handed_over", "cancelled", "refused", "failed"]
    status: int = 200
    reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    fault: Whose = ""  # of a failure: whose it was. Empty: nobody's, or not known


class Inspect(Message, frozen=True):
    seq: int
    page: int | None = None  # only what the ownership log tells about this page


class Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Inspected(Message, frozen=True):
    seq: int
    samples: list[Sample]
    state: dict[str, Any]  # JSON-able: ledger, tables, queues; what /debug/ledger shows


Pull = Request | Check | Standing
HandOff = Pull | Offer | Accept | Refused | Done | Failed | Ack | Abort | Drained | NeverStarted | Busy | Tainted
Session = Hello | Welcome | Confirm | Unwelcome | Ping | Pong | Await | Reached
Control = (
    Register | Registered | Exited | Start | Cancel | Tokens | Drawn | PromptLogprobs | Ended | Inspect | Inspected
)
Wire = HandOff | Session | Control
