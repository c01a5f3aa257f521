//! The console's port: chains of both queues, and the character device that they are for.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vm_memory::Permissions;

use super::counters::{ConsoleCounter, Tally};
use crate::device::queue_worker::{ChainContext, ChainResult, QueueHandler};
use crate::os::chardev::CharDevice;
use crate::queue::iovecs::IoVecs;
use crate::queue::ring::Chain;

/// The queue that the driver receives from (`virtio 1.4 §5.3.2`).
pub(super) const RECEIVE: u16 = 0;
/// The queue that the driver transmits to.
#[cfg(any(test, feature = "testing"))]
pub(super) const TRANSMIT: u16 = 1;
/// Most bytes transferred at once.
const PART: usize = 4096;
/// The most bytes of one chain that are transmitted. Linux transmits a page at most.
const MAX_CHAIN: usize = 256 << 10;

/// A console's port.
pub(super) struct Port {
    device: Arc<CharDevice>,
    /// True if a chain has been waiting for input since the last wait.
    input: bool,
}

impl Port {
    /// Creates the port of a console on `device`.
    pub(super) fn new(device: Arc<CharDevice>) -> Self {
        Self { device, input: false }
    }

    /// Writes the driver's output to the device.
    fn transmit<'m>(&self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, stop, storage: [storage, _], tally, .. } = context;
        if stop.load(Ordering::Acquire) {
            return ChainResult::Stopped;
        }
        let mut iovecs = IoVecs::new(storage);
        if iovecs.append(memory, chain, Permissions::Read).is_err() {
            tally.count(ConsoleCounter::TxBadChains);
            return ChainResult::Used(0);
        }
        let mut part = [0; PART];
        let mut done = 0;
        while done < MAX_CHAIN && !stop.load(Ordering::Acquire) {
            let len = iovecs.read_at(done, &mut part);
            if len == 0 {
                break;
            }
            self.device.write(&part[..len]);
            done += len;
        }
        tally.add(ConsoleCounter::TxBytes, done as u64);
        tally.add(ConsoleCounter::TxTooLong, (done >= MAX_CHAIN && iovecs.bytes() > done).into());
        ChainResult::Used(0)
    }

    /// Sends available input to the driver.
    fn receive<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, storage: [storage, _], tally, .. } = context;
        let mut iovecs = IoVecs::new(storage);
        let room = iovecs.append(memory, chain, Permissions::Write).map_or(0, |extent| extent.bytes);
        if room == 0 {
            tally.count(ConsoleCounter::RxBadChains);
            return ChainResult::Used(0);
        }
        let mut part = [0; PART];
        match self.device.read(&mut part[..room.min(PART)]) {
            Ok(len @ 1..) => {
                let written = iovecs.write_at(0, &part[..len]);
                tally.add(ConsoleCounter::RxBytes, written as u64);
                // At most PART.
                ChainResult::Used(written as u32)
            }
            result => {
                // At the end of input, there is nothing left to wait for.
                self.input = result.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
                ChainResult::Waits
            }
        }
    }
}

impl QueueHandler for Port {
    type Tally = Tally;

    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        match context.queue {
            RECEIVE => self.receive(chain, context),
            _ => self.transmit(chain, context),
        }
    }

    /// Also waits for input, if a chain does, and for a reader of buffered output. No chain waits for a time.
    fn wait(&mut self, kick: BorrowedFd<'_>, _timeout: Option<Duration>) {
        // If this fails (no memory), the queues are checked and the wait is repeated.
        let _ = self.device.wait([kick], std::mem::take(&mut self.input));
    }
}
