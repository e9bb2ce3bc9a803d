"""Who is let in, and on which data rank.

A request comes in when its known tokens and one more fit beside a reserve, so a prefill that has
begun never lacks blocks. The reserve is the watermark, and after a preemption one block of growth
for each running sequence as well, so that what was just sent away does not come back to be sent
away again. An empty rank needs no reserve.

Among the ranks where it fits, it goes where its first token comes soonest: the fewest prompt tokens
to compute, its own that no cache holds and those already admitted there. A request whose next block
is just being computed for one before it waits for that: shared prompts, those of n > 1 too, are
computed once.
"""

from collections.abc import Sequence

from configs.serving import ServingConfig
from serving.scheduling.rank import Rank
from serving.scheduling.request import Request
from serving.scheduling.room import Room
from serving.scheduling.waiting import MAX_BLOCKED, MAX_BYPASSES, WaitingLine

Place = tuple[Rank, list[int]]  # with the blocks found there


class Admission:
    """Lets requests from the line into the ranks."""

    def __init__(
        self, config: ServingConfig, ranks: Sequence[Rank], waiting: WaitingLine, room: Room
    ):
        self._ranks, self._waiting, self._room = ranks, waiting, room
        self._block_size = config.block_size
        self._watermark = int(config.watermark * ranks[0].pages.num_blocks)
        self._urgent_take = config.scheduling_policy == "priority"
        self.prefix_queries = self.prefix_hits = 0  # in tokens
        self.only_begun = False  # whether nothing comes in but what was preempted

    def admit(self, open_prefills: list[int]) -> list[Request]:
        """Lets in what fits; `open_prefills` is how many prompts each rank may begin, 0 where a
        running sequence lacks blocks, and is lowered by those that come in.
        """
        admitted: list[Request] = []
        blocked: list[Request] = []
        for request in self._waiting.front(only_begun=self.only_begun):
            if not any(open_prefills) or len(blocked) == MAX_BLOCKED:
                break
            places = self._places(request)
            if self._is_promised(places, request):
                continue
            place = self._best(places, request, open_prefills)
            if place is not None:
                self._enter(request, *place)
                open_prefills[place[0].index] -= 1
                admitted.append(request)
                for other in blocked:
                    other.bypassed += 1
                continue
            if self._urgent_take and self._make_way(places, request, open_prefills):
                break
            blocked.append(request)
            if request.bypassed >= MAX_BYPASSES:
                break
        return admitted

    def num_blocks(self, request: Request) -> int:
        """Blocks of its known tokens and the next one."""
        return -(-min(request.num_tokens + 1, request.limit) // self._block_size)

    def num_uncached_tokens(self) -> int:
        """Tokens that the waiting sequences would have computed now: those that no rank has, of the
        sequences that were looked at, and all of those behind them.
        """
        return sum(map(self._num_uncached, self._waiting))

    def _num_uncached(self, request: Request) -> int:
        if not request.chain:
            return request.num_tokens
        hashes = request.chain[: self._most_found(request)]
        found = max(rank.pages.num_found(hashes) for rank in self._ranks)
        return request.num_tokens - found * self._block_size

    def _places(self, request: Request) -> list[Place]:
        pinned = request.asked.rank
        ranks = self._ranks if pinned is None else [self._ranks[pinned]]
        most = self._most_found(request)
        hashes = request.hashes(most, self._block_size)[:most]
        return [(rank, rank.pages.find(hashes)) for rank in ranks]

    def _most_found(self, request: Request) -> int:
        """Whole blocks before the last token, which always is computed, for its logits."""
        if request.sampling.prompt_logprobs is not None:
            return 0
        return (request.num_tokens - 1) // self._block_size

    def _is_promised(self, places: list[Place], request: Request) -> bool:
        """Whether its next block is about to be computed for one that goes before it."""
        most = self._most_found(request)
        for rank, found in places:
            if len(found) < most:
                leader = rank.promised.get(request.chain[len(found)])
                if leader is not None and leader.order < request.order:
                    return True
        return False

    def _best(
        self, places: list[Place], request: Request, open_prefills: list[int]
    ) -> Place | None:
        def time_to_first_token(place: Place) -> tuple[int, int, int]:
            rank, found = place
            computed = request.num_tokens - len(found) * self._block_size
            return computed + rank.backlog, len(rank.running), rank.index

        fitting = [place for place in places if self._fits(*place, request, open_prefills)]
        return min(fitting, key=time_to_first_token, default=None)

    def _fits(
        self, rank: Rank, found: list[int], request: Request, open_prefills: list[int]
    ) -> bool:
        if not open_prefills[rank.index] or not rank.num_free_slots:
            return False
        return self._needed(rank, found, request) <= rank.pages.num_available

    def _needed(self, rank: Rank, found: list[int], request: Request) -> int:
        """Blocks that have to be available, with the reserve."""
        new = self.num_blocks(request) - len(found)
        return new + rank.pages.num_taken_from_available(found) + self._reserve(rank, request)

    def _reserve(self, rank: Rank, request: Request) -> int:
        if not rank.running and not rank.draining:
            return 0
        return self._watermark + (len(rank.running) if request.num_preemptions else 0)

    def _make_way(self, places: list[Place], request: Request, open_prefills: list[int]) -> bool:
        """Preempts less urgent sequences if that lets this one in; whether it did."""
        order = (request.order[0], float("inf"))
        for rank, found in places:
            if not open_prefills[rank.index]:
                continue
            needed = self._needed(rank, found, request)
            takes_slot = not rank.num_free_slots and not rank.draining
            if not self._room.could_make(rank, needed, order):
                continue
            if takes_slot:
                if rank.running[-1].order <= order:
                    continue
                self._room.preempt(rank, rank.running[-1])
            self._room.make(rank, needed, order)
            return True
        return False

    def _enter(self, request: Request, rank: Rank, found: list[int]) -> None:
        self._waiting.remove(request)
        if request.num_preemptions == 0:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += len(found) * self._block_size
        rank.enter(request, found, self.num_blocks(request))
