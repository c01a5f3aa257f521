use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};
use vm_memory::GuestAddress;

use super::super::locking::Locking;
use super::super::{VdpaError, VdpaFault};
use super::*;
use crate::{GuestMap, Memory};

/// The error of a device that `change` describes, as a user reads it. Nothing of the device may be left.
fn refusal(spec: VdpaSpec, change: impl FnOnce(&mut Script)) -> String {
    let kernel = Scripted::new(change);
    let error = kernel.open_as(spec).err().expect("it is refused").to_string();
    assert_eq!(kernel.0.lock().open, 0);
    assert!(!error.contains('\n'), "{error}");
    error
}

fn control_queue(pairs: u8, queues: u32) -> impl FnOnce(&mut Script) {
    move |script| {
        script.features |= 1 << VIRTIO_NET_F_CTRL_VQ | 1 << VIRTIO_NET_F_MQ;
        (script.queue_count, script.config[8]) = (queues, pairs);
    }
}

#[test]
fn each_error_of_the_file_has_its_own_message() {
    let opening = |errno| refusal(spec(1), |script| script.fails.push(("open", errno)));
    for (errno, expected) in [
        (libc::ENOENT, "no such device; create one (vdpa dev add"),
        (libc::ENXIO, "no such device; create one (vdpa dev add"),
        (libc::EBUSY, "the device is in use and can have only one user; stop the other one"),
        (libc::EACCES, "no permission to open it; give this user read and write access"),
        (libc::EIO, "the device does not answer; its driver is gone or hangs"),
        (524, "no IOMMU of the host serves the device; enable it"),
        (libc::EMFILE, "cannot open it: Too many open files"),
    ] {
        let error = opening(errno);
        assert!(error.starts_with(&format!("vdpa={PATH}: {expected}")), "{error}");
    }
    let error = refusal(spec(1), |script| script.fails.push(("owner", libc::ENOTTY)));
    assert_eq!(error, format!("vdpa={PATH}: this is not a vhost-vdpa device; name one of /dev/vhost-vdpa-*"));
}

#[test]
fn a_device_of_another_type_or_without_needed_bits_is_refused() {
    let error = refusal(spec(1), |script| script.device_id = 2);
    assert!(error.contains("virtio device of type 2"), "{error}");
    for (feature, name) in
        [(VIRTIO_F_VERSION_1, "VIRTIO_F_VERSION_1"), (VIRTIO_F_ACCESS_PLATFORM, "VIRTIO_F_ACCESS_PLATFORM")]
    {
        let error = refusal(spec(1), |script| script.features &= !(1 << feature));
        assert!(error.contains(&format!("does not offer {name}")), "{error}");
    }
}

#[test]
fn too_few_queues_are_refused_with_the_number_to_give() {
    let error = refusal(spec(2), |_| ());
    assert_eq!(
        error,
        format!("vdpa={PATH}: num_queues=4: the device has 1 pair(s) of queues; give num_queues=2 or less")
    );
    let error = refusal(spec(4), control_queue(2, 5));
    assert!(error.contains("num_queues=8: the device has 2 pair(s) of queues; give num_queues=4 or less"), "{error}");
    let error = refusal(spec(2), control_queue(4, 9));
    assert!(error.contains("num_queues=4: the device's control queue comes after its 4 pairs"), "{error}");
    assert!(error.ends_with("give num_queues=8 or num_queues=2"), "{error}");
}

#[test]
fn a_device_that_claims_more_pairs_than_queues_is_refused() {
    let error = refusal(spec(2), control_queue(2, 3));
    assert!(error.contains("has 3 queues, where 2 pair(s) and a control queue are 5; give num_queues=2"), "{error}");
    assert!(Scripted::new(control_queue(2, 3)).open_as(spec(1)).is_ok());
    let error = refusal(spec(1), |script| script.queue_count = 1);
    assert!(error.contains("has 1 queues, where 1 pair(s) are 2; name another device"), "{error}");
}

#[test]
fn memory_that_the_device_cannot_reach_is_refused() {
    let private = GuestMap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    let error = Scripted::default().open_over(spec(1), &Memory::new(private)).err().unwrap().to_string();
    assert!(error.contains("not shared") && error.ends_with("add shared=on to --memory"), "{error}");
    let error = refusal(spec(1), |script| script.iova = 0..=0xffff_ffff);
    let ranges = "the device reaches addresses 0x0 to 0xffffffff, and the guest's memory is at 0x0 to 0x1001fffff";
    assert!(error.contains(ranges), "{error}");
}

#[test]
fn memory_that_the_device_refuses_is_a_limit_where_there_is_one() {
    let error = refusal(spec(1), |script| script.fails.push(("map", libc::EFAULT)));
    let little = Locking::reserve(0, "VmPin:").limit.is_some_and(|limit| limit < 0x30_0000);
    assert!(error.contains(if little { "ulimit -l" } else { "hugepages=on" }), "{error}");
    let locking = Locking { needed: 512 << 20, limit: Some(8 << 20) };
    let error = VdpaError { path: PATH.into(), fault: VdpaFault::MemoryLock(locking) }.to_string();
    let figures =
        "needs 524288 KiB of locked memory in all, and 8192 KiB are allowed; raise the limit (ulimit -l 524288";
    assert!(error.contains(figures), "{error}");
}

#[test]
fn an_address_that_the_device_does_not_take_is_refused() {
    let error = refusal(VdpaSpec { mac: Some([2, 0, 0, 0, 0, 9]), ..spec(1) }, |_| ());
    assert!(error.contains("mac=02:00:00:00:00:09: the device has the address 52:54:00:0d:0d:07"), "{error}");
    let own = VdpaSpec { mac: Some(OWN_MAC), ..spec(1) };
    assert!(Scripted::default().open_as(own).is_ok());
}

#[test]
fn the_error_names_the_request_that_failed() {
    for (request, what) in [
        ("owner", "own the device"),
        ("features", "read the device's features"),
        ("config", "read the device's configuration"),
        ("queue-size", "read the device's size of queues"),
        ("iova-range", "read the addresses"),
        ("set-backend-features", "agree with the kernel"),
    ] {
        let error = refusal(spec(1), |script| script.fails.push((request, libc::EPERM)));
        assert!(error.contains(&format!("cannot {what}")) && error.contains("os error 1"), "{error}");
    }
}
