//! The dirty log of a peer: the pages of guest memory that it writes to (vhost-user protocol, "Migration").
//!
//! The log is by guest physical addresses, even if the peer translates: the peer converts addresses by the memory
//! table, which has both. Only the used ring is given by its I/O address then, as the rings' other addresses are.

use std::time::Duration;

use super::connection::PeerError;
use super::message::*;
use super::peer::{Peer, RingPlace, Started};
use crate::backend::SharedLog;
use crate::backend::vhost_common::{VHOST_F_LOG_ALL, VRING_F_LOG};
use crate::transport::features::has;

/// The time limit for a peer to begin or end its log.
const LOGGING: Duration = Duration::from_secs(5);
/// The feature bit of a peer that logs its writes.
pub(crate) const LOG_ALL: u64 = 1 << VHOST_F_LOG_ALL;

impl Peer {
    /// True if the peer has a dirty log.
    pub(crate) fn can_log(&self) -> bool {
        has(self.features, VHOST_F_LOG_ALL) && has(self.protocol, PROTOCOL_F_LOG_SHMFD)
    }

    /// Makes the peer log its writes in `log`, or stop logging, also while its rings run. A peer whose rings do not run
    /// gets the log when they are started.
    pub(crate) fn set_log(&mut self, log: Option<&SharedLog>) -> Result<(), PeerError> {
        let Some(Started { features, rings }) = self.started.take() else { return Ok(()) };
        self.connection.allow(LOGGING);
        let logged = log.is_some();
        if let Some(log) = log {
            self.share_log(log)?;
        }
        let features_now = if logged { features | LOG_ALL } else { features };
        rings.iter().try_for_each(|ring| self.place(ring, logged))?;
        self.set(Request::SET_FEATURES, &longs(&[features_now]), &[])?;
        // Its further writes are logged, or no longer.
        self.barrier()?;
        self.started = Some(Started { features, rings });
        Ok(())
    }

    /// Sends the log's memory to the peer. Any answer means that the peer has it.
    pub(super) fn share_log(&mut self, log: &SharedLog) -> Result<(), PeerError> {
        let request = Request::SET_LOG_BASE;
        let turn = self.connection.turn();
        let _turn = turn.lock();
        self.connection.send(request, 0, &longs(&[log.len(), 0]), &[log.file()])?;
        self.connection.answer(request).map(drop)
    }

    /// Sends the addresses of a ring, and if writes to its used ring are `logged`.
    pub(super) fn place(&mut self, ring: &RingPlace, logged: bool) -> Result<(), PeerError> {
        let (flags, log) = if logged { (VRING_F_LOG, ring.used) } else { (0, 0) };
        let [descriptors, used, available] = ring.addresses;
        let payload = [numbers(&[ring.index, flags]), longs(&[descriptors, used, available, log])].concat();
        self.set(Request::SET_VRING_ADDR, &payload, &[])
    }
}
