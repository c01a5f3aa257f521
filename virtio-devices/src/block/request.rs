//! A driver's request, from its header to its status (`virtio 1.4 §5.2.6`).

use std::io;
use std::time::Instant;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};

use super::counters::{BlockCounter, Tally};
use super::latency::BlockLatencies;
use super::operation::{Operation, Range};
use super::zeroing::Zeroing;
use crate::device::failures::{Failures, RequestKind};
use crate::queue::iovecs::Byte;
use crate::queue::ring::Used;

/// Success.
pub(crate) const OK: u8 = VIRTIO_BLK_S_OK as u8;
/// Failure.
pub(crate) const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
/// Not supported by the disk.
pub(crate) const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

/// A request that is being carried out.
pub(crate) struct Request<'m> {
    /// The head of its chain.
    pub head: u16,
    /// Requested operation.
    pub operation: Operation,
    /// Time at which the request was taken from the queue.
    pub begun: Instant,
    /// Address of the status.
    pub status: Byte<'m>,
    /// Number of bytes to transfer.
    pub bytes: usize,
    /// Number of bytes that have been transferred.
    pub done: usize,
    /// Number of bytes of a range that have become zero.
    pub zeroed: u64,
    /// The method that zeroes the range.
    pub zeroing: Zeroing,
    /// True if it goes through an aligned buffer.
    pub bounced: bool,
    /// True if it is complete only once on the medium.
    pub stable: bool,
    /// True if its data is written and is being flushed to the medium.
    pub syncing: bool,
}

impl Operation {
    /// True if the request reads or writes the image's contents.
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Self::Read(_) | Self::Write(_))
    }

    /// True for a transfer that begins at a multiple of `unit` bytes.
    pub(crate) fn begins_at(self, unit: usize) -> bool {
        match self {
            Self::Read(offset) | Self::Write(offset) => offset.is_multiple_of(unit.max(1) as u64),
            _ => true,
        }
    }

    /// The range whose contents are discarded or zeroed.
    pub(crate) fn range(self) -> Option<Range> {
        match self {
            Self::Discard(range) | Self::WriteZeroes { range, .. } => Some(range),
            _ => None,
        }
    }

    /// The kind of failure if the host cannot execute the request; `None` if the image is not needed.
    fn asked(self) -> Option<RequestKind> {
        match self {
            Self::Read(_) => Some(RequestKind::Read),
            Self::Write(_) | Self::Discard(_) | Self::WriteZeroes { .. } => Some(RequestKind::Write),
            Self::Flush => Some(RequestKind::Flush),
            Self::GetId => None,
        }
    }

    /// True if success proves that the failed kind works again: a full disk still frees space.
    fn shows_recovery(self) -> bool {
        !matches!(self, Self::Discard(_) | Self::WriteZeroes { unmap: true, .. })
    }

    /// Reports success or failure on the host, with the result of the last call.
    fn report(self, status: u8, result: &io::Result<usize>, failures: &Failures) {
        let Some(asked) = self.asked() else { return };
        match (status, result) {
            (OK, _) if self.shows_recovery() => failures.worked(asked),
            (IOERR, Err(error)) => failures.failed(asked, error),
            (IOERR, Ok(_)) => failures.failed(asked, &io::Error::other("it is shorter than the disk")),
            // The driver has a fallback.
            _ => {}
        }
    }
}

impl Request<'_> {
    /// The part of the range that is not zero yet.
    pub(crate) fn rest(&self) -> Option<Range> {
        // The sum lies within the disk.
        let rest = |Range { offset, len }| Range {
            offset: offset.saturating_add(self.zeroed),
            len: u64::saturating_sub(len, self.zeroed),
        };
        self.operation.range().map(rest)
    }

    /// Records the result of a zeroing call: `bytes` of the range are zero. A kernel call returns 0 and has zeroed the
    /// whole range, and a request without a range is complete. Returns the status after the last call.
    pub(crate) fn take_zeroed(&mut self, bytes: usize) -> Option<u8> {
        let Some(rest) = self.rest() else { return Some(OK) };
        if self.syncing {
            return Some(OK);
        }
        let bytes = if bytes == 0 { rest.len } else { (bytes as u64).min(rest.len) };
        self.zeroed = self.zeroed.saturating_add(bytes);
        self.syncing = bytes == rest.len && self.stable;
        (bytes == rest.len && !self.stable).then_some(OK)
    }

    /// Writes the status. Returns the chain for the used ring.
    pub(crate) fn finish(&self, status: u8) -> Used {
        self.status.write(status);
        let read = if matches!(self.operation, Operation::Write(_)) { 0 } else { self.done };
        Used { head: self.head, len: u32::try_from(read).unwrap_or(u32::MAX).saturating_add(1) }
    }

    /// Reports success or failure on the host, with the result of the last call.
    pub(crate) fn report(&self, status: u8, result: &io::Result<usize>, failures: &Failures) {
        // A transfer of no bytes does not use the image.
        if !self.operation.is_transfer() || self.bytes > 0 {
            self.operation.report(status, result, failures);
        }
    }

    /// Counts the request, and its latency.
    pub(crate) fn count(&self, status: u8, latencies: &BlockLatencies, tally: &mut Tally) {
        match status {
            OK => {}
            UNSUPP => return tally.count(BlockCounter::Unsupported),
            _ => return tally.count(BlockCounter::BackendErrors),
        }
        match self.operation {
            Operation::Read(_) => {
                latencies.read.note(self.begun.elapsed());
                tally.count(BlockCounter::ReadOps);
                tally.add(BlockCounter::ReadBytes, self.done as u64);
            }
            Operation::Write(_) => {
                latencies.write.note(self.begun.elapsed());
                tally.count(BlockCounter::WriteOps);
                tally.add(BlockCounter::WriteBytes, self.done as u64);
            }
            Operation::Flush => tally.count(BlockCounter::FlushOps),
            Operation::Discard(_) => tally.count(BlockCounter::DiscardOps),
            Operation::WriteZeroes { .. } => tally.count(BlockCounter::WriteZeroesOps),
            Operation::GetId => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;
    use crate::block::operation::Range;
    use crate::device::failures::FailureChange;
    use crate::os::clock::testing::StoppedClock;

    #[test]
    fn a_full_disk_works_again_when_something_is_written() {
        let clock = StoppedClock::new();
        let (failures, told) = (Failures::new("_disk0", "image"), Arc::new(Mutex::new(Vec::new())));
        let seen = Arc::clone(&told);
        failures.observe(Box::new(move |change| seen.lock().push(change)));
        let range = Range { offset: 0, len: 512 };
        let full = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
        let failing = FailureChange::Failing(io::Error::from_raw_os_error(libc::ENOSPC).to_string());
        let rest = [
            Operation::Flush,
            Operation::GetId,
            Operation::Read(0),
            Operation::Discard(range),
            Operation::WriteZeroes { range, unmap: true },
        ];
        for operation in rest {
            Operation::Write(0).report(IOERR, &full(), &failures);
            operation.report(OK, &Ok(0), &failures);
            clock.advance(Duration::from_secs(2));
            operation.report(OK, &Ok(0), &failures);
            failures.settle();
            assert_eq!(*told.lock(), std::slice::from_ref(&failing), "{operation:?}");
        }
        for operation in [Operation::Write(0), Operation::WriteZeroes { range, unmap: false }] {
            operation.report(OK, &Ok(512), &failures);
            assert_eq!(told.lock().pop(), Some(FailureChange::Recovered), "{operation:?}");
            Operation::Discard(range).report(IOERR, &full(), &failures);
            clock.advance(Duration::from_secs(2));
        }
    }
}
