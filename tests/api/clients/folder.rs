//! A vhost-user backend of a shared folder whose guest never starts a driver. It negotiates as Debian's virtiofsd does,
//! and records its requests.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::rig::vmm::wait_for;

/// Requests of the vhost-user protocol.
const GET_FEATURES: u32 = 1;
const SET_MEM_TABLE: u32 = 5;
const GET_PROTOCOL_FEATURES: u32 = 15;
const GET_QUEUE_NUM: u32 = 17;
const GET_MAX_MEM_SLOTS: u32 = 36;
/// A region of memory is added while the VM runs.
const ADD_MEM_REG: u32 = 37;

/// VIRTIO_F_VERSION_1, the protocol's features, event indices and indirect descriptors.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28;
/// Several queues, acknowledgements, and regions of memory one by one.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 15;
/// Flag of a request: an acknowledgement is required.
const NEED_REPLY: u32 = 8;
/// Flags of a reply: the protocol's version 1, and the reply bit.
const REPLY: u32 = 5;

/// The backend.
pub(super) struct Folder {
    /// A bit for each request received.
    heard: Arc<AtomicU64>,
}

impl Folder {
    /// Listens at `path`. Its thread ends with the test's process.
    pub(super) fn listen(path: &Path) -> Self {
        let folder = Self { heard: Arc::default() };
        let (listener, heard) = (UnixListener::bind(path).unwrap(), Arc::clone(&folder.heard));
        thread::spawn(move || listener.incoming().for_each(|stream| serve(stream.unwrap(), &heard)));
        folder
    }

    /// Waits until memory that was added to the running VM has been sent.
    pub(super) fn await_added_memory(&self) {
        wait_for("the backend's memory", || self.has_heard(ADD_MEM_REG));
    }

    /// True if the VM's memory has been sent, and none that was added.
    pub(super) fn has_first_memory(&self) -> bool {
        self.has_heard(SET_MEM_TABLE) && !self.has_heard(ADD_MEM_REG)
    }

    fn has_heard(&self, request: u32) -> bool {
        self.heard.load(Ordering::SeqCst) & (1 << request) != 0
    }
}

fn serve(mut stream: UnixStream, heard: &AtomicU64) {
    let mut header = [0; 12];
    // Attached descriptors are closed: nothing here touches the guest's memory.
    while stream.read_exact(&mut header).is_ok() {
        let [request, flags, length] = [0, 4, 8].map(|at| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap()));
        stream.read_exact(&mut vec![0; length as usize]).unwrap();
        heard.fetch_or(1 << request, Ordering::SeqCst);
        let answer: u64 = match request {
            GET_FEATURES => FEATURES,
            GET_PROTOCOL_FEATURES => PROTOCOL_FEATURES,
            GET_QUEUE_NUM => 2,
            GET_MAX_MEM_SLOTS => 32,
            _ if flags & NEED_REPLY != 0 => 0,
            _ => continue,
        };
        let header = [request, REPLY, 8].map(u32::to_ne_bytes).concat();
        if stream.write_all(&[header, answer.to_ne_bytes().to_vec()].concat()).is_err() {
            return;
        }
    }
}
