//! The dirty log of a peer: which pages of guest memory it writes to (vhost-user protocol, "Migration").
//!
//! The log is by guest physical addresses, also where the peer translates: it finds what an address stands for in the
//! memory table, which has both. Only the used ring is named as its driver calls it then, as the rings' other
//! addresses are.

use std::time::Duration;

use super::connection::PeerError;
use super::message::*;
use super::peer::{Peer, RingPlace, Started};
use crate::backend::SharedLog;
use crate::backend::vhost_common::{VHOST_F_LOG_ALL, VRING_F_LOG};
use crate::features::has;

/// How long a peer may take to begin or end its log.
const LOGGING: Duration = Duration::from_secs(5);
/// The feature bit of a peer that has been told to log.
pub(crate) const LOG_ALL: u64 = 1 << VHOST_F_LOG_ALL;

impl Peer {
    /// Whether the peer can log what it writes to guest memory.
    pub(crate) fn can_log(&self) -> bool {
        has(self.features, VHOST_F_LOG_ALL) && has(self.protocol, PROTOCOL_F_LOG_SHMFD)
    }

    /// Has the peer log in `log` what it writes, or nothing more, also while its rings run. One whose rings do not run
    /// is told when they are started.
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
        // What it does next is logged, or not any more.
        self.barrier()?;
        self.started = Some(Started { features, rings });
        Ok(())
    }

    /// Gives the peer the log's memory. It answers when it has it, whatever it says.
    pub(super) fn share_log(&mut self, log: &SharedLog) -> Result<(), PeerError> {
        let request = Request::SET_LOG_BASE;
        let turn = self.connection.turn();
        let _turn = turn.lock();
        self.connection.send(request, 0, &longs(&[log.len(), 0]), &[log.file()])?;
        self.connection.answer(request).map(drop)
    }

    /// Says where a ring is, and whether what is written to its used ring is `logged`.
    pub(super) fn place(&mut self, ring: &RingPlace, logged: bool) -> Result<(), PeerError> {
        let (flags, log) = if logged { (VRING_F_LOG, ring.used) } else { (0, 0) };
        let [descriptors, used, available] = ring.addresses;
        let payload = [numbers(&[ring.index, flags]), longs(&[descriptors, used, available, log])].concat();
        self.set(Request::SET_VRING_ADDR, &payload, &[])
    }
}
