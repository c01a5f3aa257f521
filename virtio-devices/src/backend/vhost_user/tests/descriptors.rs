//! Which descriptors are left open.

use std::process::Command;

use super::*;
use crate::{QueueRunner, VirtioDevice};

/// Set in the process whose descriptors are counted: other tests of this one come and go with theirs.
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
    // The same with queues that run, and memory for what is in flight.
    let mut peer = rig.peer(Script::new(1));
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    for _ in 0..10 {
        guest.start_at_once(guest.net.features());
        rig.check_traffic(&mut guest, 60);
        guest.stop();
        drop(peer);
        peer = rig.peer(Script::new(1));
    }
    drop((guest, peer));
    assert_eq!(open(), before);
}
