//! The rings that a peer runs.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK,
};
use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;
use vmm_sys_util::eventfd::EventFd;

use super::connection::{Answer, Fault, PeerError};
use super::memory;
use super::message::*;
use super::peer::Peer;
use crate::backend::{OffloadQueue, OffloadRun};
use crate::eventfd::borrow;
use crate::features::has;
use crate::net::served_for_any;

/// How long it may take to start all rings.
const START: Duration = Duration::from_secs(5);
/// How long it may take to stop all rings. A vCPU may wait for it.
const STOP: Duration = Duration::from_secs(2);
/// The device status of a driver that has found its device.
const FOUND: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;

/// Memory in which the peer keeps what it has taken from the rings and not given back: one that takes over goes by it. Its contents are
/// the peers' business.
#[derive(Debug)]
pub struct Inflight {
    /// Its size, its offset in the file, the number of queues and their size, as the peer has put it.
    shape: Vec<u8>,
    file: OwnedFd,
}

impl Peer {
    /// Starts the rings. `broken` is signalled when one makes no sense to the peer.
    pub fn start(
        &mut self,
        run: &OffloadRun<'_>,
        inflight: &mut Option<Inflight>,
        broken: &EventFd,
    ) -> Result<(), PeerError> {
        self.connection.allow(START);
        self.set_features(run.features)?;
        self.share_inflight(run, inflight)?;
        for queue in run.queues {
            self.set_up(queue, run)?;
            let payload = longs(&[queue.index.into()]);
            self.set(Request::SET_VRING_CALL, &payload, &[borrow(&queue.call)])?;
            self.set(Request::SET_VRING_ERR, &payload, &[borrow(broken)])?;
        }
        // A ring runs from here on, if it is enabled. Until now any of them could be refused, with none to be stopped.
        for queue in run.queues {
            self.set(Request::SET_VRING_KICK, &longs(&[queue.index.into()]), &[borrow(&queue.kick)])?;
        }
        for queue in run.queues {
            self.enable(queue.index, queue.index / 2 < run.active_pairs)?;
        }
        self.set_status(FOUND | VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK)?;
        self.barrier()
    }

    /// Stops `queue`. Returns the index of the next buffer that it would take. Together with the other queues, within [`STOP`] of
    /// [`Self::prepare_stop`].
    pub fn stop(&mut self, queue: u16) -> Result<u16, PeerError> {
        let request = Request::GET_VRING_BASE;
        self.enable(queue, false)?;
        let answer = self.get(request, &numbers(&[queue.into(), 0]))?;
        let position = u32_at(&answer.payload, 4).and_then(|position| u16::try_from(position).ok());
        position.ok_or(PeerError { request, fault: Fault::Nonsense })
    }

    /// Queues are stopped next.
    pub fn prepare_stop(&mut self) {
        self.connection.allow(STOP);
    }

    /// All queues are stopped.
    pub fn finish_stop(&mut self) -> Result<(), PeerError> {
        self.set_status(0)?;
        self.barrier()
    }

    /// Runs the first `pairs` pairs of `queues`, and lets the others be.
    pub fn set_active_pairs(&mut self, queues: &[u16], pairs: u16) -> Result<(), PeerError> {
        self.connection.allow(START);
        queues.iter().try_for_each(|queue| self.enable(*queue, queue / 2 < pairs))?;
        self.barrier()
    }

    /// Has `queue` signal `call`.
    pub fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), PeerError> {
        self.connection.allow(START);
        self.set(Request::SET_VRING_CALL, &longs(&[queue.into()]), &[borrow(call)])?;
        self.barrier()
    }

    /// The commands of the control queue are not the peer's business.
    fn set_features(&mut self, negotiated: u64) -> Result<(), PeerError> {
        let request = Request::SET_FEATURES;
        let ours = served_for_any() & !(1 << VIRTIO_NET_F_MQ);
        let features = (negotiated & !ours | 1 << F_PROTOCOL_FEATURES) & self.features;
        self.set(request, &longs(&[features]), &[])?;
        self.set_status(FOUND | VIRTIO_CONFIG_S_FEATURES_OK)?;
        // Whether it takes them shows in the status (`virtio 1.4 §2.1`).
        if has(self.protocol, PROTOCOL_F_STATUS)
            && self.get_u64(Request::GET_STATUS)? & u64::from(VIRTIO_CONFIG_S_FEATURES_OK) == 0
        {
            return Err(PeerError { request, fault: Fault::Refused });
        }
        Ok(())
    }

    fn set_status(&mut self, status: u32) -> Result<(), PeerError> {
        match has(self.protocol, PROTOCOL_F_STATUS) {
            true => self.set(Request::SET_STATUS, &longs(&[status.into()]), &[]),
            false => Ok(()),
        }
    }

    /// Gives the peer the memory that an earlier one has used, or asks it for some.
    fn share_inflight(&mut self, run: &OffloadRun<'_>, inflight: &mut Option<Inflight>) -> Result<(), PeerError> {
        if !has(self.protocol, PROTOCOL_F_INFLIGHT_SHMFD) {
            *inflight = None;
            return Ok(());
        }
        if inflight.is_none() {
            *inflight = self.get_inflight(run)?;
        }
        match inflight {
            Some(inflight) => self.set(Request::SET_INFLIGHT_FD, &inflight.shape, &[inflight.file.as_fd()]),
            None => Ok(()),
        }
    }

    /// `None` from a peer that needs no memory.
    fn get_inflight(&mut self, run: &OffloadRun<'_>) -> Result<Option<Inflight>, PeerError> {
        let request = Request::GET_INFLIGHT_FD;
        let queues = run.queues.last().map_or(0, |queue| queue.index + 1);
        let size = run.queues.iter().map(|queue| queue.size).max().unwrap_or(0);
        // The size and the offset are the peer's to fill in. The last four bytes are padding.
        let counts = [queues.to_ne_bytes(), size.to_ne_bytes(), [0; 2], [0; 2]].concat();
        let Answer { payload, fd } = self.get(request, &[longs(&[0, 0]), counts].concat())?;
        match (u64_at(&payload, 0), fd) {
            (Some(0), _) => Ok(None),
            (Some(_), Some(file)) => Ok(Some(Inflight { shape: payload, file })),
            _ => Err(PeerError { request, fault: Fault::Nonsense }),
        }
    }

    /// Says where a ring is and where it goes on.
    fn set_up(&mut self, queue: &OffloadQueue, run: &OffloadRun<'_>) -> Result<(), PeerError> {
        let index = u32::from(queue.index);
        let size = u64::from(queue.size);
        let address = |at, len| {
            let request = Request::SET_VRING_ADDR;
            memory::address(run.memory, at, len).ok_or(PeerError { request, fault: Fault::NotInMemory })
        };
        // As long as the driver may make them (`virtio 1.4 §2.7`), with `used_event` and `avail_event`.
        let descriptors = address(queue.descriptors, 16 * size)?;
        let used = address(queue.used, 6 + 8 * size)?;
        let available = address(queue.available, 6 + 2 * size)?;
        self.set(Request::SET_VRING_NUM, &numbers(&[index, queue.size.into()]), &[])?;
        self.set(Request::SET_VRING_BASE, &numbers(&[index, queue.position.into()]), &[])?;
        let addresses = [numbers(&[index, 0]), longs(&[descriptors, used, available, 0])].concat();
        self.set(Request::SET_VRING_ADDR, &addresses, &[])
    }

    /// Enables or disables a ring. Without protocol features a ring that has its doorbell is enabled, and there is one pair.
    fn enable(&mut self, queue: u16, enabled: bool) -> Result<(), PeerError> {
        match has(self.features, F_PROTOCOL_FEATURES) {
            true => self.set(Request::SET_VRING_ENABLE, &numbers(&[queue.into(), enabled.into()]), &[]),
            false => Ok(()),
        }
    }
}
