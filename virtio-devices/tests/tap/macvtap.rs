//! Queues of a macvtap, which are opened by its own device file and passed as descriptors.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, makedev, mknodat, open};
use virtio_devices::{BackendChange, Counter, Tap, VirtioDevice};

use crate::driver::*;
use crate::frames::*;
use crate::host::*;
use crate::lost::{changes, follow};
use crate::sample::*;

/// Makes the macvtap `tap0` on one end of a pair of interfaces, whose other end is `far`.
fn make() {
    new_namespace();
    ip("link add near type veth peer name far");
    ip("link add link near name tap0 type macvtap mode passthru");
    for name in ["near", "far", "tap0"] {
        // The host itself says nothing on it.
        let knob = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
        if Path::new(&knob).exists() {
            std::fs::write(knob, "1").unwrap();
        }
        ip(&format!("link set {name} up"));
    }
}

/// Opens queues of `tap0`, as a program does that knows nothing of flags.
fn open_queues(count: usize) -> Vec<OwnedFd> {
    let index: u32 = std::fs::read_to_string("/sys/class/net/tap0/ifindex").unwrap().trim().parse().unwrap();
    let number = std::fs::read_to_string(format!("/sys/class/net/tap0/tap{index}/dev")).unwrap();
    let (major, minor) = number.trim().split_once(':').unwrap();
    let number = makedev(major.parse().unwrap(), minor.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tap");
    mknodat(rustix::fs::CWD, &path, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, number).unwrap();
    (0..count).map(|_| open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap()).collect()
}

#[test]
fn several_queues_of_a_macvtap_are_given_the_flags_they_lack() {
    make();
    for _ in 0..2 {
        // The second time they are as another program has left them.
        let queues = open_queues(4);
        let copies = || queues.iter().map(|queue| queue.as_fd().try_clone_to_owned().unwrap()).collect();
        drop(Tap::from_fds(copies()).unwrap());
        let mut machine = Machine::over(Tap::from_fds(copies()).unwrap(), 4);
        machine.start(machine.net.features());
        assert_eq!(machine.command(8, &[4, 0, 4, 0]), 0);
        (0..4).for_each(|pair| machine.provide(2 * pair, 32, 2048));
        let far = Wire::new("far");
        eventually("frames of several flows in several pairs", || {
            (0..16).for_each(|flow| far.send(&flow_frame(flow)));
            (1..4).any(|pair| !machine.queues[2 * pair].take_used().is_empty())
        });
        machine.transmit(&with_header(&frame(OTHER, 100)));
        eventually("a frame of the driver", || {
            std::iter::from_fn(|| far.receive()).any(|received| received == frame(OTHER, 100))
        });
    }
}

#[test]
fn a_macvtap_that_was_deleted_is_lost() {
    make();
    let mut machine = Machine::over(Tap::from_fds(open_queues(1)).unwrap(), 1);
    let changes = changes(&machine);
    machine.start(one_pair(&machine.net));
    machine.provide(0, 4, 2048);
    machine.transmit(&with_header(&frame(OTHER, 100)));
    // It is deleted with the interface that it is on.
    ip("link delete far");
    follow(&machine, &changes, &[BackendChange::Lost]);
    machine.transmit(&with_header(&frame(OTHER, 100)));
    assert_eq!((machine.count(Counter::TxFrames), machine.count(Counter::TxLinkDown)), (1, 1));
}
