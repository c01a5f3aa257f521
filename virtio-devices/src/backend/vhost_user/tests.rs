//! A NIC over a peer in another thread, which speaks the protocol by its numbers and carries frames between rings that
//! it maps itself and a socket.

mod confined;
mod descriptors;
mod device;
mod device_state;
mod dirty_log;
mod iotlb;
mod memory;
mod negotiation;
mod peer;
mod rings;
mod running;
mod sockets;
mod translated;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use vm_memory::{FileOffset, GuestAddress};

use super::{Cancel, VhostUser, VhostUserError, VhostUserRole, VhostUserSocket, VhostUserSpec};
use crate::net::testing::*;
use crate::{GuestMap, GuestRegion, HostNic, Memory};
use peer::{Script, TestPeer};

/// The time limit for a peer to connect.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder for sockets, the memory shared with the peer, and the far end of the wire behind it.
struct Rig {
    folder: tempfile::TempDir,
    map: GuestMap,
    /// The peer's end of the wire, which outlives the peer.
    near: Arc<OwnedFd>,
    wire: OwnedFd,
}

impl Rig {
    fn new() -> Self {
        let (near, wire) = sockets();
        Self { folder: tempfile::tempdir().unwrap(), map: shared_memory(), near: Arc::new(near), wire }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("vf1.sock")
    }

    /// A peer that listens.
    fn peer(&self, script: Script) -> TestPeer {
        TestPeer::listen(&self.path(), script, Arc::clone(&self.near))
    }

    fn spec(&self, queue_pairs: u16) -> VhostUserSpec {
        let socket = VhostUserSocket::of_peer(self.path());
        VhostUserSpec {
            socket,
            role: VhostUserRole::Nic { queue_pairs },
            until: Instant::now() + PATIENCE,
            cancel: None,
        }
    }

    /// As [`Self::spec`], for a peer that connects.
    fn server_spec(&self) -> VhostUserSpec {
        VhostUserSpec { socket: VhostUserSocket::listen(self.path()).unwrap(), ..self.spec(1) }
    }

    fn connect(&self, queue_pairs: u16) -> Result<VhostUser, VhostUserError> {
        VhostUser::connect(self.spec(queue_pairs), &Memory::new(self.map.clone()))
    }

    /// The error of a failed connection.
    fn refusal(&self) -> String {
        let path = self.path().display().to_string();
        self.connect(1).map(|_| ()).unwrap_err().to_string().replace(&path, "PATH")
    }

    /// A NIC over the peer, and its driver.
    fn guest(&self, backend: VhostUser, pairs: u16) -> Guest {
        Guest::over_in(spec(pairs, 16), backend, self.map.clone())
    }

    /// Sends a frame each way through the first pair, and checks that it arrives and that the driver is interrupted.
    fn check_traffic(&self, guest: &mut Guest, len: usize) {
        guest.provide(0, 1, 2048);
        send(&self.wire, &with_header(&frame(MAC, len)));
        let mut used = Vec::new();
        eventually("reception", || {
            used.extend(guest.queues[0].take_used());
            !used.is_empty()
        });
        assert_eq!(used.iter().map(|(_, len)| *len as usize).collect::<Vec<_>>(), [len + 12]);
        assert_eq!(guest.queues[0].bytes(BUFFERS, len + 12), with_header(&frame(MAC, len)));
        eventually("its interrupt", || guest.interrupts.eventfd(0).unwrap().read().is_ok());

        guest.queues[1].send(BUFFERS + (1 << 20), &with_header(&frame(OTHER, len)), &[12]);
        guest.kick(1);
        let mut sent = None;
        eventually("transmission", || {
            sent = sent.take().or_else(|| receive(&self.wire));
            sent.is_some()
        });
        assert_eq!(sent, Some(with_header(&frame(OTHER, len))));
        eventually("the buffer's return", || guest.queues[1].take_used().len() == 1);
    }
}

/// Guest memory that other processes can map.
fn shared_memory() -> GuestMap {
    let file = File::from(rustix::fs::memfd_create("guest-memory", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(MEMORY + 4096).unwrap();
    // Not at the file's start, so that a peer must use the offset.
    let range = (GuestAddress(0), MEMORY as usize, Some(FileOffset::new(file, 4096)));
    GuestMap::from_ranges_with_files([range]).unwrap()
}

/// `map` with a further region of `len` bytes at `at`.
fn grown(map: &GuestMap, at: u64, len: u64) -> GuestMap {
    let file = File::from(rustix::fs::memfd_create("more-memory", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    let region = GuestRegion::from_range(GuestAddress(at), len as usize, Some(FileOffset::new(file, 0)));
    map.insert_region(Arc::new(region.unwrap())).unwrap()
}

fn await_loss(guest: &Guest, lost: bool) {
    eventually("a change of the backend", || guest.device.backend_lost() == lost);
}
