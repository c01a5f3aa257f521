//! The requests of a queue, from the ring to the image and back (`virtio 1.4 §5.2.6`).

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES;

use super::call::Call;
use super::counters::{BlockCounter, BlockCounters, Tally};
use super::engine::Engine;
use super::image::writes::Writes;
use super::image::{Contents, Image};
use super::latency::BlockLatencies;
use super::operation::{HEADER, Operation, Range, Refusal, SEGMENT};
use super::request::{IOERR, OK, Request, UNSUPP};
use super::zeroing::{Lacking, Zeroing};
use crate::device::failures::Failures;
use crate::device::rate_limiter::RateLimitGroup;
use crate::queue::iovecs::{IoVecs, Storage, divide};
use crate::queue::ring::{BrokenRing, Chain, Ring, Used};
use crate::{DmaView, Interrupts};

/// The most requests that are begun in one turn, before completions and a stop are handled.
const BATCH: usize = 32;
/// Limit of bytes in flight: no further request is begun beyond it, because a stop waits for them.
const MAX_IN_FLIGHT: usize = 64 << 20;
/// Limit of bytes that this thread transfers in one turn: no further request is begun beyond it, so that complete
/// requests are returned first.
const MAX_AT_ONCE: usize = 4 << 20;

/// Context of requests, except their memory.
pub(crate) struct Disk<'d> {
    /// The image.
    pub image: &'d Image,
    /// Serial number, as the driver reads it.
    pub serial: &'d [u8; VIRTIO_BLK_ID_BYTES as usize],
    /// True if a write completes only once it is on the medium.
    pub stable: &'d AtomicBool,
    /// The counters.
    pub counters: &'d BlockCounters,
    /// Interrupts of the device.
    pub interrupts: &'d Interrupts,
    /// Latencies of requests.
    pub latencies: &'d BlockLatencies,
    /// Failures of the host.
    pub failures: &'d Failures,
    /// Rate limits of all queues together.
    pub limiter: Option<&'d RateLimitGroup>,
    /// Set when the worker must end.
    pub stop: &'d AtomicBool,
}

impl Disk<'_> {
    /// Time until another request may begin; `None` if it may now.
    fn limited_for(&self) -> Option<Duration> {
        self.limiter?.limited_for()
    }
}

/// End of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// There may be more to do.
    More,
    /// A doorbell, or a completion.
    Wait,
    /// A rate limit: wait this long with doorbells off.
    Limited(Duration),
}

/// Reusable storage for one request's segments.
#[derive(Default)]
pub(crate) struct Room([Storage; 2]);

/// The requests of a queue that are in flight, in one view of guest memory. Dropping it waits for them.
pub(crate) struct Requests<'r, 'm> {
    disk: Disk<'r>,
    engine: &'r mut Engine,
    memory: &'m DmaView,
    entries: Vec<Entry<'r, 'm>>,
    /// The free tags, which are indices of entries.
    free: Vec<usize>,
    /// The bytes of the requests in flight.
    in_flight: usize,
    /// The bytes that this thread has transferred in this turn.
    at_once: usize,
    used: Vec<Used>,
    /// Requests that need another call.
    postponed: Vec<usize>,
}

/// A request, or room for one.
struct Entry<'r, 'm> {
    /// Data from the driver: the header, and the data to write.
    readable: IoVecs<'r, 'm>,
    /// Buffers for data that is read.
    writable: IoVecs<'r, 'm>,
    request: Option<Request<'m>>,
    /// True while its call counts as a write in flight, which partial-block writes wait for.
    entered: bool,
}

/// Step after a call.
enum Progress {
    /// Another call.
    Again,
    /// The request is complete.
    Done,
}

/// Progress of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begun {
    /// The request is complete, or in flight.
    Yes,
    /// The worker must end, and the request counts as never taken from the queue.
    No,
}

impl<'r, 'm> Requests<'r, 'm> {
    /// Creates an empty set with one entry for each of `room`.
    pub(crate) fn new(disk: Disk<'r>, engine: &'r mut Engine, memory: &'m DmaView, room: &'r mut [Room]) -> Self {
        let entries: Vec<_> = room
            .iter_mut()
            .map(|Room([readable, writable])| Entry {
                readable: IoVecs::new(readable),
                writable: IoVecs::new(writable),
                request: None,
                entered: false,
            })
            .collect();
        let free = (0..entries.len()).collect();
        let (used, postponed) = (Vec::with_capacity(BATCH), Vec::new());
        Self { disk, engine, memory, entries, free, in_flight: 0, at_once: 0, used, postponed }
    }

    /// Returns completed requests, and begins those that the driver has made available.
    pub(crate) fn turn(&mut self, ring: &mut Ring<'_>, tally: &mut Tally) -> Result<Next, BrokenRing> {
        ring.suppress_doorbells(self.memory)?;
        self.reap(tally);
        let mut drained = false;
        let mut limited = None;
        self.at_once = 0;
        for _ in 0..BATCH {
            if self.at_once > MAX_AT_ONCE || self.disk.stop.load(Ordering::Acquire) {
                break;
            }
            let Some(tag) = self.next_tag() else { break };
            limited = self.disk.limited_for();
            if limited.is_some() {
                break;
            }
            let Some(chain) = ring.next(self.memory)? else {
                drained = true;
                break;
            };
            if self.begin(tag, chain, tally) == Begun::No {
                // Only the last request taken can be put back. If the driver resumes the queue, the request
                // starts over.
                ring.put_back(1);
            }
        }
        self.go_on(tally);
        self.engine.submit();
        self.give_back(ring, tally)?;
        if let Some(wait) = limited {
            if !ring.expect_doorbell(self.memory)? {
                return Ok(Next::Wait);
            }
            ring.suppress_doorbells(self.memory)?;
            tally.count(BlockCounter::RateWaits);
            return Ok(Next::Limited(wait));
        }
        // Without a free tag only a completion helps, so a missed doorbell does not matter.
        let more = if drained { ring.expect_doorbell(self.memory)? } else { self.next_tag().is_some() };
        Ok(if more { Next::More } else { Next::Wait })
    }

    /// Room for another request.
    fn next_tag(&self) -> Option<usize> {
        self.free.last().copied().filter(|_| self.in_flight < MAX_IN_FLIGHT)
    }

    /// True if these requests use that view of guest memory.
    pub(crate) fn is_in(&self, memory: &DmaView) -> bool {
        self.memory.is_same(memory)
    }

    /// The engine, whose events are waited for in addition to doorbells.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        self.engine
    }

    /// True if nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.free.len() == self.entries.len()
    }

    /// Waits for all requests, and returns them.
    pub(crate) fn finish(mut self, ring: &mut Ring<'_>, tally: &mut Tally) -> Result<(), BrokenRing> {
        while !self.is_idle() {
            self.engine.submit();
            self.engine.wait();
            self.reap(tally);
        }
        self.give_back(ring, tally)
    }

    fn give_back(&mut self, ring: &mut Ring<'_>, tally: &mut Tally) -> Result<(), BrokenRing> {
        if self.used.is_empty() {
            return Ok(());
        }
        // Counted before the driver sees the requests as complete.
        tally.flush(self.disk.counters);
        ring.give_back(self.memory, &self.used)?;
        self.used.clear();
        if ring.wants_interrupt(self.memory)? {
            self.disk.interrupts.signal_queue(ring.index());
            tally.count(BlockCounter::Interrupts);
        }
        Ok(())
    }

    fn reap(&mut self, tally: &mut Tally) {
        self.take_complete(tally);
        self.go_on(tally);
    }

    /// Handles completions.
    fn take_complete(&mut self, tally: &mut Tally) {
        while let Some((tag, result)) = self.engine.next_complete() {
            self.leave(tag);
            if let Progress::Again = self.follow(tag, result, tally) {
                self.postponed.push(tag);
            }
        }
    }

    /// Makes the next calls of requests that need another.
    fn go_on(&mut self, tally: &mut Tally) {
        while let Some(tag) = self.postponed.pop() {
            // The request is in flight again, unless complete. It cannot be put back for a stop, because others were
            // taken after it.
            let _ = self.advance(tag, tally, false);
        }
    }

    /// Waits until no call of this queue is in flight, before this thread waits for other queues.
    fn drain(&mut self, tally: &mut Tally) {
        while self.entries.iter().any(|entry| entry.entered) {
            self.engine.submit();
            self.engine.wait();
            self.take_complete(tally);
        }
    }

    /// Enters the next call of the request `tag`, if any, into the order of writes. Returns true for a partial-block
    /// write.
    fn enter(&mut self, tag: usize, tally: &mut Tally) -> bool {
        let image = self.disk.image;
        let Some(writes) = image.shared_blocks() else { return false };
        match self.entries.get(tag).map(Entry::step) {
            Some(Step::ZeroParts(..)) => return true,
            Some(Step::WriteBounced(range, _) | Step::WriteZeros(range)) if !is_whole(range, image.alignment) => {
                return true;
            }
            Some(
                Step::WriteBounced(..) | Step::WriteZeros(..) | Step::Call(Call::Write { .. } | Call::Zero { .. }),
            ) => {}
            _ => return false,
        }
        if !writes.try_enter() {
            self.drain(tally);
            writes.enter();
        }
        self.entries.get_mut(tag).into_iter().for_each(|entry| entry.entered = true);
        false
    }

    /// Removes the ended call of the request `tag` from the order of writes.
    fn leave(&mut self, tag: usize) {
        let entered = self.entries.get_mut(tag).is_some_and(|entry| std::mem::take(&mut entry.entered));
        if let (true, Some(writes)) = (entered, self.disk.image.shared_blocks()) {
            writes.leave();
        }
    }

    /// Parses a request, and begins it under a free tag.
    fn begin(&mut self, tag: usize, chain: Chain<'m>, tally: &mut Tally) -> Begun {
        let Some(entry) = self.entries.get_mut(tag) else { return Begun::Yes };
        let head = chain.head_index();
        // A refused request takes time, too, and counts for the limit.
        self.disk.limiter.into_iter().for_each(RateLimitGroup::take_op);
        let mut header = [0; HEADER];
        entry.readable.clear();
        entry.writable.clear();
        let divided = divide(self.memory, chain, &mut entry.readable, &mut entry.writable);
        let status = entry.writable.take_last();
        let (Ok(()), Some(status)) = (divided, status) else {
            tally.count(BlockCounter::BadChains);
            self.used.push(Used { head, len: 0 });
            return Begun::Yes;
        };
        let operation = if entry.readable.take_front(&mut header) {
            let (readable, writable) = (entry.readable.bytes(), entry.writable.bytes());
            let mut segment = [0; SEGMENT];
            let len = entry.readable.read_at(0, &mut segment);
            self.disk.image.abilities().parse(header, &segment[..len], readable, writable)
        } else {
            Err(Refusal::Invalid)
        };
        let stable = self.disk.stable.load(Ordering::Acquire);
        let request = Request {
            head,
            begun: Instant::now(),
            status,
            bytes: 0,
            done: 0,
            zeroed: 0,
            zeroing: Zeroing::Nothing,
            bounced: false,
            stable,
            syncing: false,
            operation: Operation::GetId,
        };
        match operation {
            Ok(Operation::GetId) => {
                let done = entry.writable.write_at(0, self.disk.serial);
                self.used.push(Request { done, ..request }.finish(OK));
            }
            Ok(operation) => {
                let segments = if let Operation::Read(_) = operation { &entry.writable } else { &entry.readable };
                let bytes = segments.bytes();
                if let (Some(limiter), true) = (self.disk.limiter, operation.is_transfer()) {
                    limiter.take_bytes(bytes as u64);
                }
                let image = self.disk.image;
                let is_raw = matches!(image.contents(), Contents::Raw(_));
                let alignment = image.alignment;
                let is_aligned = is_aligned(segments.segments(), alignment) && operation.begins_at(alignment);
                let bounced = match operation.range() {
                    Some(range) => !is_whole(range, image.range_unit()),
                    None => operation.is_transfer() && !(is_raw && is_aligned),
                };
                tally.add(BlockCounter::BouncedOps, (bounced && is_raw).into());
                let bounced = bounced || image.keeps_raw && operation == Operation::Write(0);
                let zeroing = image.lacking.way(operation);
                entry.request = Some(Request { operation, bytes, bounced, zeroing, ..request });
                self.in_flight += bytes;
                self.free.pop();
                return self.advance(tag, tally, true);
            }
            Err(refusal) => {
                let (status, counter) = match refusal {
                    Refusal::Unsupported => (UNSUPP, BlockCounter::Unsupported),
                    Refusal::Invalid => (IOERR, BlockCounter::BadRequests),
                };
                tally.count(counter);
                self.used.push(request.finish(status));
            }
        }
        Begun::Yes
    }

    /// Makes the request's next call, and further ones while each completes at once. A stop need not wait for all of
    /// them if the request is the last one taken: data already transferred is transferred again when the queue resumes.
    fn advance(&mut self, tag: usize, tally: &mut Tally, is_last: bool) -> Begun {
        loop {
            let changes_part = self.enter(tag, tally);
            if changes_part {
                self.drain(tally);
            }
            let image = self.disk.image;
            let _alone = image.shared_blocks().filter(|_| changes_part).map(Writes::alone);
            let Self { engine, entries, .. } = self;
            let Some(entry) = entries.get(tag) else { return Begun::Yes };
            let step = entry.step();
            let writes_zeros = matches!(step, Step::WriteZeros(_));
            let result = match step {
                Step::Nothing => Ok(0),
                Step::ReadBounced(offset) => engine.read_bounced(&entry.writable, offset),
                Step::WriteBounced(range, stable) => engine.write_bounced(&entry.readable, range.offset, stable),
                Step::WriteZeros(range) => engine.write_zeros(range),
                Step::ZeroParts(range, unmap, must_zero) => engine.zero_parts(range, unmap, must_zero),
                // SAFETY: the segments lie in the entry's storage, which does not change until the call is complete,
                // and outlives this; they name guest memory, which stays mapped as long as `'m`. `drop` waits for all
                // calls.
                Step::Call(call) => match unsafe { engine.start(tag, call) } {
                    Some(result) => result,
                    None => return Begun::Yes,
                },
            };
            self.leave(tag);
            if let (true, Ok(bytes), Some(limiter)) = (writes_zeros, &result, self.disk.limiter) {
                // Written zeros use bandwidth as data does.
                limiter.take_bytes(*bytes as u64);
            }
            self.at_once = self.at_once.saturating_add(*result.as_ref().unwrap_or(&0));
            if let Progress::Done = self.follow(tag, result, tally) {
                return Begun::Yes;
            }
            if is_last && self.disk.stop.load(Ordering::Acquire) {
                self.forget(tag);
                return Begun::No;
            }
        }
    }

    /// Removes a request that is not in flight.
    fn forget(&mut self, tag: usize) {
        if let Some(request) = self.entries.get_mut(tag).and_then(|entry| entry.request.take()) {
            self.in_flight = self.in_flight.saturating_sub(request.bytes);
            self.free.push(tag);
        }
    }

    /// Handles a call's result.
    fn follow(&mut self, tag: usize, result: io::Result<usize>, tally: &mut Tally) -> Progress {
        let Some(entry) = self.entries.get_mut(tag) else { return Progress::Done };
        if entry.takes_another_way(&result, &self.disk.image.lacking) {
            return Progress::Again;
        }
        let Some(status) = entry.take_note(&result) else { return Progress::Again };
        if let Some(request) = entry.request.take() {
            // The host's image has failed, unless this program refused the driver's data.
            let is_refused = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidData);
            if !(is_refused && self.disk.image.keeps_raw) {
                request.report(status, &result, self.disk.failures);
            }
            request.count(status, self.disk.latencies, tally);
            self.used.push(request.finish(status));
            self.in_flight = self.in_flight.saturating_sub(request.bytes);
            self.free.push(tag);
        }
        Progress::Done
    }
}

impl Drop for Requests<'_, '_> {
    fn drop(&mut self) {
        // Requests are left only after an invalid ring, or in a panic.
        self.free.append(&mut self.postponed);
        while !self.is_idle() {
            self.engine.submit();
            self.engine.wait();
            while let Some((tag, _)) = self.engine.next_complete() {
                self.leave(tag);
                self.entries.get(tag).into_iter().for_each(Entry::note_all);
                self.free.push(tag);
            }
        }
    }
}

/// Next need of a request.
enum Step<'c> {
    Call(Call<'c>),
    ReadBounced(u64),
    WriteBounced(Range, bool),
    WriteZeros(Range),
    ZeroParts(Range, bool, bool),
    Nothing,
}

impl Entry<'_, '_> {
    fn step(&self) -> Step<'_> {
        let Some(request) = &self.request else { return Step::Nothing };
        let Request { stable, done, .. } = *request;
        if request.syncing {
            return Step::Call(Call::Sync);
        }
        if let Some(range) = request.rest() {
            return match request.zeroing {
                Zeroing::Nothing => Step::Nothing,
                Zeroing::Written => Step::WriteZeros(range),
                way if request.bounced => {
                    let must_zero = matches!(request.operation, Operation::WriteZeroes { .. });
                    Step::ZeroParts(range, way == Zeroing::Hole, must_zero)
                }
                way => Step::Call(Call::Zero { range, unmap: way == Zeroing::Hole }),
            };
        }
        // The sum lies within the disk.
        let at = |offset: u64| offset.saturating_add(done as u64);
        match request.operation {
            Operation::Read(_) | Operation::Write(_) if request.bytes == 0 => Step::Nothing,
            Operation::Read(offset) if request.bounced => Step::ReadBounced(at(offset)),
            Operation::Write(offset) if request.bounced => {
                let len = (request.bytes - done) as u64;
                Step::WriteBounced(Range { offset: at(offset), len }, stable)
            }
            Operation::Read(offset) => Step::Call(Call::Read(self.writable.segments(), at(offset))),
            Operation::Write(offset) => {
                Step::Call(Call::Write { iovecs: self.readable.segments(), offset: at(offset), stable })
            }
            Operation::Flush => Step::Call(Call::Sync),
            Operation::Discard(_) | Operation::WriteZeroes { .. } | Operation::GetId => Step::Nothing,
        }
    }

    /// Marks the driver's buffers as written.
    fn note_all(&self) {
        if matches!(&self.request, Some(request) if matches!(request.operation, Operation::Read(_))) {
            self.writable.note_written(usize::MAX);
        }
    }

    /// True if the storage lacks the request's zeroing method, and the next one must be tried.
    fn takes_another_way(&mut self, result: &io::Result<usize>, lacking: &Lacking) -> bool {
        let refused = result.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP));
        let Some(request) = self.request.as_mut().filter(|request| refused && !request.syncing) else { return false };
        let follows = request.operation.range().is_some() && lacking.note(request.zeroing);
        if follows {
            request.zeroing = lacking.way(request.operation);
        }
        follows
    }

    /// Records a call's result. Returns the status if that was the last call.
    fn take_note(&mut self, result: &io::Result<usize>) -> Option<u8> {
        if result.is_err() {
            // The call may have read a part.
            self.note_all();
        }
        let Some(request) = &mut self.request else { return Some(IOERR) };
        let transferred = match result {
            Ok(transferred) => *transferred,
            Err(error) => {
                return match error.raw_os_error() {
                    Some(libc::EINTR) => None,
                    _ => Some(IOERR),
                };
            }
        };
        let segments = match request.operation {
            Operation::Read(_) => &mut self.writable,
            Operation::Write(_) => &mut self.readable,
            _ => return request.take_zeroed(transferred),
        };
        let left = request.bytes - request.done;
        let transferred = transferred.min(left);
        if matches!(request.operation, Operation::Read(_)) {
            segments.note_written(transferred);
        }
        segments.advance(transferred);
        request.done += transferred;
        match left - transferred {
            0 => Some(OK),
            // The image has become shorter.
            _ if transferred == 0 => Some(IOERR),
            _ => None,
        }
    }
}

/// True if a part of an image is whole blocks of `unit` bytes.
fn is_whole(Range { offset, len }: Range, unit: usize) -> bool {
    [offset, len].iter().all(|n| n.is_multiple_of(unit.max(1) as u64))
}

/// True if all addresses and lengths are multiples of `alignment`.
fn is_aligned(segments: &[libc::iovec], alignment: usize) -> bool {
    let alignment = alignment.max(1);
    segments.iter().all(|segment| {
        (segment.iov_base as usize).is_multiple_of(alignment) && segment.iov_len.is_multiple_of(alignment)
    })
}
