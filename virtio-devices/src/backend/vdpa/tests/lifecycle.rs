use std::os::fd::AsRawFd;
use std::time::Instant;

use virtio_bindings::virtio_config::VIRTIO_F_SR_IOV;
use virtio_bindings::virtio_net::*;

use super::*;
use crate::Backend;
use crate::backend::{Attention, StartError};
use crate::net::testing::Guest;
use crate::testing::driver_queue::eventually;
use crate::transport::features::has;
use crate::{HostNic, VirtioDevice};

const SUSPENDS: u64 = PLAIN | PERSIST | 1 << 4;
const RESUMES: u64 = SUSPENDS | 1 << 5;

/// The requests that start both queues of a pair, from the features on.
fn setup(positions: [u16; 2]) -> Vec<String> {
    let mut asked: Vec<String> =
        ["status 3", "set-features 0x300010000", "status 11", "config-call"].map(Into::into).into();
    for (index, position) in positions.iter().enumerate() {
        let base = 0x1_0000 * (index + 1);
        asked.push(format!("size {index} 128"));
        asked.push(format!("rings {index} {base:#x} {:#x} {:#x}", base + 0x1000, base + 0x2000));
        asked.push(format!("position {index} {position}"));
        asked.push(format!("kick {index}"));
        asked.push(format!("call {index}"));
    }
    asked.extend(["enable 0", "enable 1", "status 15"].map(Into::into));
    asked
}

#[test]
fn opening_owns_the_device_and_maps_all_memory_in_one_batch() {
    let kernel = Scripted::new(|script| script.backend_features = RESUMES | 1 << 3 | 1 << 7);
    let vdpa = kernel.open().unwrap();
    let expected = [
        "open",
        "owner",
        "device-id",
        "features",
        "config",
        "queue-count",
        "queue-size",
        "iova-range",
        "backend-features",
        // Address spaces (3) and groups for descriptors (7) are of no use here.
        "set-backend-features 0x136",
        "batch-begin",
        "map 0x0+0x100000",
        "map 0x100000000+0x200000",
        "batch-end",
        "doorbell 0",
    ];
    assert_eq!(kernel.asked(), expected);
    assert!(vdpa.doorbell_pages().is_none(), "a device without such pages");
    let ability = vdpa.ability();
    assert_eq!((ability.mac, ability.mtu, ability.queue_pairs), (Some(OWN_MAC), Some(1450), 1));
    assert_eq!((ability.queue_size, ability.name.as_str()), (256, PATH));
    assert!(vdpa.watched().is_empty(), "it says nothing before it runs");
    drop(vdpa);
    assert_eq!((kernel.asked(), kernel.0.lock().open), (vec!["close".to_string()], 0));
}

#[test]
fn a_kernel_without_batches_is_given_each_part_alone() {
    let kernel = Scripted::new(|script| script.backend_features = 1 << 1);
    let _vdpa = kernel.open().unwrap();
    let asked = kernel.asked();
    assert_eq!(asked[asked.len() - 3..], ["map 0x0+0x100000", "map 0x100000000+0x200000", "doorbell 0"]);
    assert!(!asked.contains(&"batch-begin".to_string()));
}

#[test]
fn a_start_negotiates_sets_up_the_queues_and_runs_the_device() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    kernel.asked();
    // Features that the device lacks are the NIC's own and are masked: that its function has VFs.
    let features = NEGOTIATED | 1 << VIRTIO_F_SR_IOV | 1 << VIRTIO_NET_F_SPEED_DUPLEX;
    start_with(&mut vdpa, &[queue(0, 7), queue(1, 9)], features, true).unwrap();
    assert_eq!(kernel.asked(), setup([7, 9]));
    assert_eq!(vdpa.watched().len(), 2);
    assert_eq!(vdpa.stop(), [None, None]);
    assert_eq!(kernel.asked(), ["status 0"]);
    assert!(vdpa.watched().is_empty());
    assert_eq!((vdpa.stop(), kernel.asked()), (Vec::new(), Vec::new()), "one that does not run is not reset");
}

#[test]
fn starts_and_stops_change_nothing_of_what_the_device_reaches() {
    for (backend_features, release) in
        [(PLAIN | PERSIST, (6, 12)), (PLAIN, (6, 12)), (PLAIN, (6, 7)), (PLAIN | PERSIST, (5, 14))]
    {
        let kernel = Scripted::new(|script| (script.backend_features, script.release) = (backend_features, release));
        let mut vdpa = kernel.open().unwrap();
        assert_eq!(kernel.iotlb_updates(), 2);
        kernel.asked();
        for _ in 0..5 {
            start(&mut vdpa, [0, 0], true).unwrap();
            vdpa.stop();
        }
        assert_eq!(kernel.iotlb_updates(), 0, "{backend_features:#x} {release:?}");
    }
}

#[test]
fn mappings_are_made_again_after_a_reset_if_linux_drops_them() {
    let kernel = Scripted::new(|script| script.release = (6, 6));
    let mut vdpa = kernel.open().unwrap();
    kernel.asked();
    start(&mut vdpa, [0, 0], true).unwrap();
    assert_eq!(kernel.iotlb_updates(), 0, "there was no reset yet");
    vdpa.stop();
    kernel.asked();
    start(&mut vdpa, [0, 0], true).unwrap();
    let expected = [
        "batch-begin",
        "unmap 0x0+0x100000",
        "map 0x0+0x100000",
        "unmap 0x100000000+0x200000",
        "map 0x100000000+0x200000",
        "batch-end",
        "status 3",
    ];
    assert_eq!(kernel.asked()[..expected.len()], expected);
}

#[test]
fn a_device_that_cannot_resume_is_suspended_and_then_reset() {
    let kernel = Scripted::new(|script| script.backend_features = SUSPENDS);
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    kernel.asked();
    vdpa.stop();
    assert_eq!(kernel.asked(), ["suspend", "status 0"]);
}

#[test]
fn a_pause_keeps_what_the_device_knows_and_a_reset_does_not() {
    let kernel = Scripted::new(|script| script.backend_features = RESUMES);
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    kernel.asked();
    assert_eq!(vdpa.stop(), [None, None]);
    assert_eq!(kernel.asked(), ["suspend"]);
    // A new worker has other eventfds.
    start(&mut vdpa, [3, 4], false).unwrap();
    assert_eq!(kernel.asked(), ["kick 0", "call 0", "kick 1", "call 1", "resume"]);
    vdpa.stop();
    kernel.asked();
    // The driver's commands are in force although nothing has passed yet.
    start(&mut vdpa, [0, 0], false).unwrap();
    assert_eq!(kernel.asked().last().map(String::as_str), Some("resume"));
    vdpa.stop();
    kernel.asked();
    let reset_first = |positions| [vec!["status 0".to_string()], setup(positions)].concat();
    start(&mut vdpa, [0, 0], true).unwrap();
    assert_eq!(kernel.asked(), reset_first([0, 0]), "after a reset");
    vdpa.stop();
    kernel.asked();
    let moved = RunnerQueue { size: 64, ..queue(0, 5) };
    start_with(&mut vdpa, &[moved, queue(1, 6)], NEGOTIATED, false).unwrap();
    assert_eq!(kernel.asked()[..2], ["status 0", "status 3"], "with other queues");
    vdpa.stop();
    kernel.fail("resume", libc::EOPNOTSUPP);
    kernel.asked();
    let other = RunnerQueue { size: 64, ..queue(0, 8) };
    start_with(&mut vdpa, &[other, queue(1, 8)], NEGOTIATED, false).unwrap();
    assert!(kernel.asked().contains(&"position 0 8".to_string()), "where it cannot be resumed after all");
}

#[test]
fn a_device_that_takes_no_position_starts_only_for_a_new_driver() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    kernel.fail("position 0 5", libc::EOPNOTSUPP);
    start(&mut vdpa, [0, 0], true).unwrap();
    vdpa.stop();
    let error = start(&mut vdpa, [5, 0], false).unwrap_err();
    assert!(matches!(error, StartError::Refused(_)) && error.to_string().contains("its driver has to reset it"));
    assert_eq!((kernel.asked().last().map(String::as_str), kernel.0.lock().open), (Some("status 0"), 1), "it is there");
    start(&mut vdpa, [0, 0], true).unwrap();
    vdpa.stop();
    kernel.mend();
    kernel.fail("position 0 5", libc::EIO);
    assert!(matches!(start(&mut vdpa, [5, 0], false), Err(StartError::Lost(_))), "any other failure is a loss");
}

#[test]
fn a_device_that_lost_commands_by_a_reset_refuses_to_continue() {
    let kernel = Scripted::new(|script| {
        script.features |= 1 << VIRTIO_NET_F_CTRL_VQ;
        script.queue_count = 3;
    });
    let mut vdpa = kernel.open().unwrap();
    let queues = |positions: [u16; 3]| [0, 1, 2].map(|index| queue(index, positions[usize::from(index)]));
    start_with(&mut vdpa, &queues([0; 3]), NEGOTIATED, true).unwrap();
    vdpa.stop();
    start_with(&mut vdpa, &queues([7, 9, 0]), NEGOTIATED, false).unwrap();
    vdpa.stop();
    let error = start_with(&mut vdpa, &queues([7, 9, 1]), NEGOTIATED, false).unwrap_err();
    assert!(matches!(error, StartError::Refused(_)) && error.to_string().contains("commanded"), "{error}");
    start_with(&mut vdpa, &queues([0; 3]), NEGOTIATED, true).unwrap();
}

#[test]
fn a_device_without_commands_continues_by_resume_or_positions() {
    let commanded = FEATURES | 1 << VIRTIO_NET_F_CTRL_VQ;
    for (features, backend_features, position_error, goes_on) in [
        (FEATURES, PLAIN, None, true),
        (FEATURES, PLAIN, Some(libc::EOPNOTSUPP), false),
        (FEATURES, SUSPENDS, Some(libc::EOPNOTSUPP), false),
        (FEATURES, RESUMES, Some(libc::EOPNOTSUPP), true),
        (commanded, PLAIN, None, false),
        (commanded, SUSPENDS, None, false),
        (commanded, RESUMES, None, false),
    ] {
        let kernel = Scripted::new(|script| {
            (script.features, script.backend_features, script.queue_count) = (features, backend_features, 3);
            script.fails.extend(position_error.map(|errno| ("position", errno)));
        });
        let mut vdpa = kernel.open().unwrap();
        let case = format!("{features:#x} {backend_features:#x} {position_error:?}");
        assert_eq!(vdpa.goes_on_after_stop(), goes_on, "{case}");
        vdpa.close();
        assert_eq!(vdpa.goes_on_after_stop(), goes_on, "{case}: lost");
        vdpa.recover().unwrap();
        assert_eq!(vdpa.goes_on_after_stop(), goes_on, "{case}: back");
        let asked = kernel.asked();
        let told = asked.iter().rfind(|asked| asked.starts_with("position"));
        assert!(told.is_none_or(|told| position_error.is_some() || told == "position 0 0"), "{case}: {told:?}");
    }
}

#[test]
fn the_link_follows_the_device_and_a_change_is_reported() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    assert_eq!(vdpa.attend().unwrap(), Attention::Link(true));
    kernel.set_link(false);
    let heard = vdpa.config_call.as_raw_fd();
    assert!(vdpa.watched().iter().any(|fd| fd.as_raw_fd() == heard));
    assert_eq!(vdpa.attend().unwrap(), Attention::Link(false));
    assert!(vdpa.config_call.read().is_err(), "a change is not reported twice");
    // A reset ends the notifications, so that each start requests them.
    vdpa.stop();
    start(&mut vdpa, [0, 0], true).unwrap();
    assert!(kernel.0.lock().config_call.is_some());
}

#[test]
fn a_device_without_a_status_has_its_link_up() {
    let kernel = Scripted::new(|script| script.features = FEATURES & !(1 << VIRTIO_NET_F_STATUS));
    let mut vdpa = kernel.open().unwrap();
    kernel.set_link(false);
    start(&mut vdpa, [0, 0], true).unwrap();
    assert_eq!(vdpa.attend().unwrap(), Attention::Link(true));
}

#[test]
fn an_unresponsive_device_is_closed_and_reopened_on_its_return() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    kernel.asked();
    kernel.fail("probe", libc::EIO);
    vdpa.attend().unwrap();
    assert_eq!(kernel.asked(), ["config"], "it is not asked all the time");
    vdpa.pulse = Instant::now();
    assert!(vdpa.attend().unwrap_err().to_string().starts_with("cannot reach the device"));
    assert_eq!(kernel.asked(), ["probe 0", "close"]);
    assert!(vdpa.watched().is_empty());
    assert_eq!(vdpa.stop(), [None, None]);
    kernel.fail("open", libc::ENOENT);
    assert!(vdpa.recover().unwrap_err().to_string().contains("no such device"));
    assert!(start(&mut vdpa, [0, 0], false).is_err());
    kernel.mend();
    kernel.asked();
    vdpa.recover().unwrap();
    let asked = kernel.asked();
    assert_eq!(
        (asked.first().map(String::as_str), asked.last().map(String::as_str)),
        (Some("open"), Some("doorbell 0"))
    );
    start(&mut vdpa, [5, 5], false).unwrap();
    vdpa.recover().unwrap();
    assert_eq!(kernel.0.lock().open, 1);
}

#[test]
fn a_device_that_cannot_answer_such_a_question_is_not_lost() {
    for errno in [libc::EOPNOTSUPP, libc::EINVAL] {
        let kernel = Scripted::default();
        let mut vdpa = kernel.open().unwrap();
        start(&mut vdpa, [0, 0], true).unwrap();
        kernel.fail("probe", errno);
        vdpa.pulse = Instant::now();
        assert_eq!(vdpa.attend().unwrap(), Attention::Link(true), "{errno}");
        assert!(vdpa.pulse > Instant::now());
    }
}

#[test]
fn a_device_that_stops_by_itself_is_lost() {
    for status in [0, 11] {
        let kernel = Scripted::default();
        let mut vdpa = kernel.open().unwrap();
        start(&mut vdpa, [0, 0], true).unwrap();
        kernel.0.lock().status = status;
        assert!(vdpa.attend().is_err(), "{status}");
        assert_eq!(kernel.0.lock().open, 0);
    }
}

/// If it were reopened, it would find the same ring: the driver has to act.
#[test]
fn a_device_that_needs_a_reset_is_kept_and_its_driver_notified() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    kernel.0.lock().status = 15 | 64;
    assert_eq!(vdpa.attend().unwrap(), Attention::BrokenRing);
    assert_eq!(kernel.0.lock().open, 1);
}

#[test]
fn a_device_that_fails_to_start_is_reset_or_else_closed() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    for request in ["set-features", "rings", "enable", "status 15"] {
        kernel.fail(request, libc::EINVAL);
        start(&mut vdpa, [0, 0], true).unwrap_err();
        assert_eq!(
            (kernel.asked().last().map(String::as_str), kernel.0.lock().open),
            (Some("status 0"), 1),
            "{request}"
        );
        kernel.mend();
        vdpa.recover().unwrap();
        assert!(!kernel.asked().contains(&"open".to_string()));
        start(&mut vdpa, [0, 0], true).unwrap();
        vdpa.stop();
    }
    // The kernel hides that a device does not accept its status.
    kernel.0.lock().deaf = true;
    assert!(start(&mut vdpa, [0, 0], true).unwrap_err().to_string().starts_with("cannot start the device"));
    kernel.fail("status 0", libc::EIO);
    start(&mut vdpa, [0, 0], true).unwrap_err();
    assert_eq!(kernel.0.lock().open, 0);
}

#[test]
fn a_device_that_cannot_be_stopped_is_closed() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    kernel.fail("status", libc::EIO);
    assert_eq!(vdpa.stop(), [None, None]);
    assert_eq!((kernel.0.lock().open, vdpa.stop_failures), (0, 1));
}

#[test]
fn a_device_that_returns_with_another_identity_is_refused() {
    type Change = fn(&mut Script);
    let changes: [Change; 4] = [
        |script| script.config[5] ^= 1,
        |script| script.features &= !(1 << VIRTIO_NET_F_MRG_RXBUF),
        |script| script.features |= 1 << VIRTIO_NET_F_CTRL_VQ,
        |script| script.device_id = 2,
    ];
    for change in changes {
        let kernel = Scripted::new(|script| script.queue_count = 3);
        let mut vdpa = kernel.open().unwrap();
        start(&mut vdpa, [0, 0], true).unwrap();
        kernel.0.lock().status = 0;
        vdpa.attend().unwrap_err();
        change(&mut kernel.0.lock());
        kernel.asked();
        vdpa.recover().unwrap_err();
        assert_eq!(kernel.iotlb_updates(), 0, "it has never reached the guest's memory");
        assert_eq!(kernel.0.lock().open, 0);
    }
}

#[test]
fn a_mac_address_given_to_the_device_is_set_again_after_a_reset() {
    let kernel = Scripted::new(|script| script.config_is_read_only = false);
    let mac = [2, 0, 0, 0, 0, 9];
    let mut vdpa = kernel.open_as(VdpaSpec { mac: Some(mac), ..spec(1) }).unwrap();
    assert_eq!(vdpa.ability().mac, Some(mac));
    kernel.asked();
    start(&mut vdpa, [0, 0], true).unwrap();
    assert_eq!(kernel.asked()[0], format!("set-config {mac:x?}"));
}

#[test]
fn a_vdpa_nic_adds_announcements_and_no_filters_to_its_device() {
    let kernel = Scripted::default();
    let nic = crate::net::testing::spec(1, 128);
    let mut guest = Guest::over(nic, Backend::from(kernel.open().unwrap()));
    let features = guest.device.features();
    assert!(has(features, VIRTIO_NET_F_MRG_RXBUF) && has(features, VIRTIO_NET_F_MTU));
    assert!(has(features, VIRTIO_NET_F_CTRL_VQ) && has(features, VIRTIO_NET_F_GUEST_ANNOUNCE));
    let filters = [VIRTIO_NET_F_CTRL_RX, VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CSUM];
    assert!(filters.iter().all(|filter| !has(features, *filter)));
    assert_eq!(HostNic::mac(&guest.device), OWN_MAC);
    kernel.asked();
    for _ in 0..5 {
        guest.start_with(NEGOTIATED);
        eventually("the start", || kernel.0.lock().status == 15);
        guest.stop();
        assert_eq!(kernel.0.lock().status, 0);
        guest.device.reset();
    }
    let asked = kernel.asked();
    assert_eq!(asked.iter().filter(|asked| *asked == "status 15").count(), 5);
    assert!(!asked.iter().any(|asked| asked.contains("map")));
}

/// The requests to a device while the host takes the link down, and when it is up again. The device may have a control
/// queue that has received a command.
fn cut_and_mend(backend_features: u64, commanded: bool) -> [Vec<String>; 2] {
    let control = u64::from(commanded) << VIRTIO_NET_F_CTRL_VQ;
    let kernel = Scripted::new(|script| {
        script.features |= control;
        (script.backend_features, script.queue_count) = (backend_features, 2 + u32::from(commanded));
    });
    let mut guest = Guest::over(crate::net::testing::spec(1, 128), Backend::from(kernel.open().unwrap()));
    guest.start_with(NEGOTIATED | control);
    eventually("the start", || kernel.0.lock().status == 15);
    if commanded {
        guest.queues[2].write(guest.queues[2].used() + 2, 1_u16.to_le_bytes());
    }
    kernel.asked();
    let asked = [false, true].map(|up| {
        guest.device.set_link(up).wait().unwrap();
        // The worker has handled the link once it has seen a later change, or has made the requests about the link.
        guest.interrupts.set_queue_vector(1, if up { 1 } else { crate::NO_VECTOR });
        guest.workers[0].wake();
        let done = |asked: &String| ["call 1", "suspend", "status 0", "resume"].contains(&asked.as_str());
        eventually("the link", || kernel.0.lock().asked.iter().any(done));
        assert_eq!(guest.device.link_up(), up);
        kernel.asked()
    });
    assert!(!guest.interrupts.needs_reset() && kernel.0.lock().status == 15);
    asked
}

#[test]
fn a_device_with_commands_runs_while_the_hosts_link_is_down() {
    for asked in [SUSPENDS, RESUMES].into_iter().flat_map(|features| cut_and_mend(features, true)) {
        assert!(!asked.iter().any(|asked| asked == "suspend" || asked.starts_with("status")), "{asked:?}");
    }
}

#[test]
fn a_resuming_device_without_commands_stops_at_link_down() {
    let [down, up] = cut_and_mend(RESUMES, false);
    assert!(down.contains(&"suspend".to_string()), "{down:?}");
    assert!(!down.iter().chain(&up).any(|asked| asked.starts_with("status")), "{down:?} {up:?}");
}

#[test]
fn a_nic_over_it_is_lost_and_restored_with_its_device() {
    let kernel = Scripted::default();
    let nic = crate::net::testing::spec(1, 128);
    let mut guest = Guest::over(nic, Backend::from(kernel.open().unwrap()));
    guest.start_with(NEGOTIATED);
    eventually("the start", || kernel.0.lock().status == 15);
    {
        let mut script = kernel.0.lock();
        script.status = 64;
        script.fails.push(("open", libc::EIO));
        script.config_call.as_ref().map(|call| call.write(1));
    }
    eventually("the loss", || guest.device.backend_lost() && !guest.device.link_up());
    kernel.mend();
    eventually("the return", || !guest.device.backend_lost() && guest.device.link_up());
}

#[test]
fn a_device_without_a_mac_has_its_commands_served_by_the_nic() {
    let bare = FEATURES & !(1 << VIRTIO_NET_F_MAC);
    for (features, config) in [(bare, OWN_MAC), (FEATURES, [0; 6])] {
        let kernel = Scripted::new(|script| {
            script.features = features | 1 << VIRTIO_NET_F_MQ | 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
            script.config[..6].copy_from_slice(&config);
        });
        let ability = kernel.open().unwrap().ability();
        assert_eq!((ability.mac, ability.control_queue), (None, false));
        for served in [VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_CTRL_RX, VIRTIO_NET_F_CTRL_MAC_ADDR] {
            assert!(has(ability.features, served), "{served}");
        }
        assert!(!has(ability.features, VIRTIO_NET_F_MQ) && !has(ability.features, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS));
    }
}

#[test]
fn a_control_queue_of_the_device_is_run_by_it() {
    let kernel = Scripted::new(|script| {
        script.features |= 1 << VIRTIO_NET_F_CTRL_VQ | 1 << VIRTIO_NET_F_CTRL_RX | 1 << VIRTIO_NET_F_MQ;
        (script.queue_count, script.config[8]) = (5, 2);
    });
    for pairs in [1, 2] {
        let mut vdpa = kernel.open_as(spec(pairs)).unwrap();
        let ability = vdpa.ability();
        assert!(ability.control_queue && has(ability.features, VIRTIO_NET_F_CTRL_RX));
        assert!(!has(ability.features, VIRTIO_NET_F_CTRL_MAC_ADDR), "what the device does not do is not made up");
        kernel.asked();
        let queues: Vec<_> = (0..=2 * pairs).map(|index| queue(index, 0)).collect();
        start_with(&mut vdpa, &queues, NEGOTIATED, true).unwrap();
        assert!(kernel.asked().contains(&format!("enable {}", 2 * pairs)));
    }
}
