//! The rings that a peer runs.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_F_ACCESS_PLATFORM,
};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::connection::{Answer, Fault, PeerError};
use super::dirty_log::LOG_ALL;
use super::memory;
use super::message::*;
use super::peer::{Peer, RingPlace, Started};
use crate::backend::{QueueRun, RunnerQueue, SharedLog};
use crate::os::eventfd::borrow;
use crate::transport::features::has;

/// The time limit for starting all rings.
const START: Duration = Duration::from_secs(5);
/// The time limit for stopping all rings. A vCPU may wait for it.
const STOP: Duration = Duration::from_secs(2);
/// The feature bit of a peer that asks for translations of the addresses of its rings and buffers.
const TRANSLATED: u64 = 1 << VIRTIO_F_ACCESS_PLATFORM;
/// The device status of a driver that has found its device.
const FOUND: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;

/// Memory in which the peer records buffers that it took and has not returned: its successor continues from it. Only
/// peers interpret it.
#[derive(Debug)]
pub(crate) struct Inflight {
    /// The size, the offset in the file, the number of queues and their size, as the peer has sent them.
    shape: Vec<u8>,
    file: OwnedFd,
}

/// The features that a peer has agreed to.
#[derive(Debug)]
pub(crate) struct Agreed {
    /// The feature bits, without that of the log.
    features: u64,
    /// The peer logs its writes.
    logged: bool,
}

impl Peer {
    /// Agrees on the features, before [`Self::start`]. A peer that is `translated` accepts mappings from here on.
    pub(crate) fn agree(
        &mut self,
        run: &QueueRun<'_>,
        log: Option<&SharedLog>,
        translated: bool,
    ) -> Result<Agreed, PeerError> {
        self.connection.allow(START);
        if let Some(log) = log {
            self.share_log(log)?;
        }
        let ours = self.role.served_here() | LOG_ALL | TRANSLATED;
        let features = (run.features | 1 << F_PROTOCOL_FEATURES) & !ours & self.features;
        let features = if translated { features | TRANSLATED } else { features };
        self.set_features(if log.is_some() { features | LOG_ALL } else { features })?;
        Ok(Agreed { features, logged: log.is_some() })
    }

    /// Starts the rings. The peer signals `broken` when one is invalid.
    pub(crate) fn start(
        &mut self,
        run: &QueueRun<'_>,
        inflight: &mut Option<Inflight>,
        broken: &EventFd,
        Agreed { features, logged }: Agreed,
    ) -> Result<(), PeerError> {
        self.share_inflight(run, inflight)?;
        let mut rings = Vec::with_capacity(run.queues.len());
        for queue in run.queues {
            rings.push(self.set_up(queue, run, (features & TRANSLATED != 0, logged))?);
            let payload = longs(&[queue.index.into()]);
            self.set(Request::SET_VRING_CALL, &payload, &[borrow(&queue.call)])?;
            self.set(Request::SET_VRING_ERR, &payload, &[borrow(broken)])?;
        }
        // An enabled ring runs from here on. Up to now, a refusal needed no ring to be stopped.
        for queue in run.queues {
            self.set(Request::SET_VRING_KICK, &longs(&[queue.index.into()]), &[borrow(&queue.kick)])?;
        }
        for queue in run.queues {
            self.enable(queue.index, queue.index / 2 < run.active_pairs)?;
        }
        self.set_status(FOUND | VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK)?;
        self.barrier()?;
        self.started = Some(Started { features, rings });
        Ok(())
    }

    /// Stops `queue`. Returns the index of the next buffer that it would take. Together with the other queues, within
    /// [`STOP`] of [`Self::prepare_stop`].
    pub(crate) fn stop(&mut self, queue: u16) -> Result<u16, PeerError> {
        let request = Request::GET_VRING_BASE;
        self.started = None;
        self.enable(queue, false)?;
        let answer = self.get(request, &numbers(&[queue.into(), 0]))?;
        let position = u32_at(&answer.payload, 4).and_then(|position| u16::try_from(position).ok());
        position.ok_or(PeerError { request, fault: Fault::Nonsense })
    }

    /// Sets the time limit for the stop of all queues, which follows.
    pub(crate) fn prepare_stop(&mut self) {
        self.connection.allow(STOP);
    }

    /// Completes a stop, after all queues.
    pub(crate) fn finish_stop(&mut self) -> Result<(), PeerError> {
        self.set_status(0)?;
        self.barrier()
    }

    /// Runs the first `pairs` of the pairs in `queues`, and stops the others.
    pub(crate) fn set_active_pairs(&mut self, queues: &[u16], pairs: u16) -> Result<(), PeerError> {
        self.connection.allow(START);
        queues.iter().try_for_each(|queue| self.enable(*queue, queue / 2 < pairs))?;
        self.barrier()
    }

    /// Makes `queue` signal `call`.
    pub(crate) fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), PeerError> {
        self.connection.allow(START);
        self.set(Request::SET_VRING_CALL, &longs(&[queue.into()]), &[borrow(call)])?;
        self.barrier()
    }

    /// Sets the features, and checks that the peer accepts them.
    fn set_features(&mut self, features: u64) -> Result<(), PeerError> {
        let request = Request::SET_FEATURES;
        self.set(request, &longs(&[features]), &[])?;
        self.set_status(FOUND | VIRTIO_CONFIG_S_FEATURES_OK)?;
        // The status shows if it does (`virtio 1.4 §2.1`).
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

    /// Sends the peer the in-flight memory of its predecessor, or requests new memory from it.
    fn share_inflight(&mut self, run: &QueueRun<'_>, inflight: &mut Option<Inflight>) -> Result<(), PeerError> {
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

    /// Requests memory for buffers in flight. `None` if the peer needs none.
    fn get_inflight(&mut self, run: &QueueRun<'_>) -> Result<Option<Inflight>, PeerError> {
        let request = Request::GET_INFLIGHT_FD;
        let queues = run.queues.last().map_or(0, |queue| queue.index + 1);
        let size = run.queues.iter().map(|queue| queue.size).max().unwrap_or(0);
        // The peer fills in the size and the offset. The last four bytes are padding.
        let counts = [queues.to_ne_bytes(), size.to_ne_bytes(), [0; 2], [0; 2]].concat();
        let Answer { payload, fd } = self.get(request, &[longs(&[0, 0]), counts].concat())?;
        match (u64_at(&payload, 0), fd) {
            (Some(0), _) => Ok(None),
            (Some(_), Some(file)) => Ok(Some(Inflight { shape: payload, file })),
            _ => Err(PeerError { request, fault: Fault::Nonsense }),
        }
    }

    /// Sends the addresses of a ring, its position, and if it is `logged`.
    fn set_up(
        &mut self,
        queue: &RunnerQueue,
        run: &QueueRun<'_>,
        (translated, logged): (bool, bool),
    ) -> Result<RingPlace, PeerError> {
        let index = u32::from(queue.index);
        let size = u64::from(queue.size);
        let address = |at: GuestAddress, len| {
            let request = Request::SET_VRING_ADDR;
            let here = if translated { Some(at.0) } else { memory::address(run.memory, at, len) };
            here.ok_or(PeerError { request, fault: Fault::NotInMemory })
        };
        // The lengths that the driver may use (`virtio 1.4 §2.7`), with `used_event` and `avail_event`.
        let descriptors = address(queue.descriptors, 16 * size)?;
        let used = address(queue.used, 6 + 8 * size)?;
        let available = address(queue.available, 6 + 2 * size)?;
        self.set(Request::SET_VRING_NUM, &numbers(&[index, queue.size.into()]), &[])?;
        self.set(Request::SET_VRING_BASE, &numbers(&[index, queue.position.into()]), &[])?;
        let place = RingPlace { index, addresses: [descriptors, used, available], used: queue.used.0 };
        self.place(&place, logged)?;
        Ok(place)
    }

    /// Enables or disables a ring. Without protocol features, a ring with a doorbell is enabled, and there is one pair.
    fn enable(&mut self, queue: u16, enabled: bool) -> Result<(), PeerError> {
        match has(self.features, F_PROTOCOL_FEATURES) {
            true => self.set(Request::SET_VRING_ENABLE, &numbers(&[queue.into(), enabled.into()]), &[]),
            false => Ok(()),
        }
    }
}
