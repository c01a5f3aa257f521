//! Leaks of descriptors.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::super::connection::receive;
use super::*;
use crate::{QueueRunner, VirtioDevice};

/// Set in the process whose descriptors are counted: in this one, other tests open and close theirs.
const ALONE: &str = "VHOST_USER_TEST_ALONE";

fn open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn no_descriptor_is_left_over_a_hundred_reconnections() {
    if std::env::var_os(ALONE).is_none() {
        let name = "backend::vhost_user::tests::descriptors::no_descriptor_is_left_over_a_hundred_reconnections";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let output = alone.args(["--exact", name, "--nocapture"]).env(ALONE, "").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    let rig = Rig::new();
    let before = open();
    let first = rig.peer(Script::new(1));
    let mut backend = rig.connect(1).unwrap();
    drop(first);
    let mut counts = Vec::new();
    for round in 0..100 {
        // Each third one is refused, and each third one dies before it has answered all.
        let mut script = Script::new(1);
        match round % 3 {
            0 => script.features &= !(1 << virtio_bindings::virtio_net::VIRTIO_NET_F_CSUM),
            1 => script = script.without(&[3]),
            _ => {}
        }
        let peer = rig.peer(script);
        assert_eq!(backend.recover().is_ok(), round % 3 != 0);
        drop(peer);
        let _ = backend.attend();
        counts.push(open());
    }
    assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
    drop(backend);
    // The same with queues that run, and memory for buffers in flight.
    let mut peer = rig.peer(Script::new(1));
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    for _ in 0..10 {
        guest.start_with(guest.device.features());
        rig.check_traffic(&mut guest, 60);
        guest.stop();
        drop(peer);
        peer = rig.peer(Script::new(1));
    }
    drop((guest, peer));
    assert_eq!(open(), before);
}

/// Sends one byte with descriptors.
fn send_with(stream: &UnixStream, byte: u8, fds: &[OwnedFd]) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    assert_eq!(sendmsg(stream, &[IoSlice::new(&[byte])], &mut ancillary, SendFlags::empty()), Ok(1));
}

#[test]
fn a_reply_in_pieces_with_many_descriptors_keeps_only_one() {
    let (near, far) = UnixStream::pair().unwrap();
    let (mut readers, mut kept) = (Vec::new(), None);
    for _ in 0..10 {
        let (ends, others): (Vec<_>, Vec<_>) =
            (0..8).map(|_| rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()).unzip();
        send_with(&far, 1, &others);
        readers.extend(ends);
        drop(others);
        assert_eq!(receive(near.as_fd(), &mut [0; 12], &mut kept), Ok(1));
    }
    assert!(kept.is_some());
    // A pipe hangs up when no copy of its other end is open.
    let hangs_up = |reader: &&OwnedFd| poll(&mut [PollFd::new(reader, PollFlags::IN)], Some(&Timespec::default()));
    // A child that another test starts has copies until it executes its program.
    eventually("one open end", || readers.iter().filter(|reader| hangs_up(reader) != Ok(1)).count() == 1);
}
