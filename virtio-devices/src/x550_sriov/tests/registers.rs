//! Registers through the windows of the PF and its VFs.

use super::*;

#[test]
fn impossible_devices_are_refused() {
    let refused = |spec, total| {
        let device = X550Sriov::new(spec, placement(total), &memory(), Arc::new(NoPath::default()));
        device.err().unwrap().to_string()
    };
    let with = |mac| X550Spec { mac, ..spec(4) };
    let mac = "mac: not an address that a NIC can have; give one whose first byte is even";
    assert_eq!(refused(with([1, 0, 0, 0, 0, 1]), 4), mac);
    assert_eq!(refused(with([0; 6]), 4), mac);
    assert_eq!(refused(spec(64), 64), "64 VFs; an X550 has at most 63");
    assert_eq!(refused(X550Spec { model: Model::X540, ..spec(64) }, 64), "64 VFs; an X540 has at most 63");
    assert_eq!(refused(spec(4), 5), "4 VFs at a place that reserves 5");
    assert_eq!(refused(spec(0), 1), "0 VFs at a place that reserves 1");
}

/// X28: configuration space.
#[test]
fn the_model_decides_on_the_ids_of_all_functions() {
    for (product, [pf, vf]) in [(Model::X550, [0x1563_8086, 0x1565]), (Model::X540, [0x1528_8086, 0x1515])] {
        let (mut device, _) = model(product, 4);
        assert_eq!(device.nic().lock().model(), product);
        assert_eq!(read_config(&device, PF, 0), pf, "{product}");
        // The VF Device ID of the SR-IOV capability; a VF's own reads all-ones (PCIe 6.2 §9.3.4.1.1, §9.3.3.11).
        assert_eq!(read_config(&device, PF, SRIOV + 0x18) >> 16, vf, "{product}");
        set_master(&mut device, PF, true);
        let _ = enable(&mut device, 4);
        assert_eq!(read_config(&device, rid(3), 0), u32::MAX, "{product}");
    }
}

#[test]
fn each_vector_of_msix_is_an_open_file() {
    for total in [0, 1, 63] {
        let (device, _) = device(total);
        let vectors = device.functions.functions().map(|function| {
            let msix = pci::Function::config(function).msix().map(|msix| u64::from(msix.vectors()));
            assert_eq!(msix, function.vectors().map(|vectors| vectors.count().into()));
            msix.unwrap()
        });
        assert_eq!(vectors.sum::<u64>(), spec(total).open_files(), "{total} VFs");
    }
}

#[test]
fn an_x550_without_vfs_has_no_sriov_capability() {
    let (mut device, _) = device(0);
    assert_eq!((read_config(&device, PF, 0), read_config(&device, PF, SRIOV)), (0x1563_8086, 0));
    assert!(device.sriov_status().is_none() && device.function_status(Some(VfIndex(0))).is_none());
    set_master(&mut device, PF, true);
    assert_eq!(enable(&mut device, 1), Effects::NONE);
    assert_eq!(read_config(&device, rid(0), 0), u32::MAX);
    set_up_pools(&mut device);
    let _ = write(&mut device, Place::Pf, 0x1028, ENABLE);
    assert_eq!(device.nic().lock().owner(0), (Place::Pf, 0));
    let mut windows = Vec::new();
    device.windows(&mut windows);
    assert_eq!(windows.len(), 2, "its own BARs");
}

#[test]
fn a_register_is_reached_through_the_window_of_its_function() {
    let (mut device, _) = enabled(63, 63);
    assert_eq!(read(&mut device, Place::Pf, 8) >> 10 & 0xff, 63);
    device.set_link(true);
    for index in 0..63 {
        assert_eq!(read(&mut device, Place::Vf(index), 0x10), 0x7000_0000, "VFLINKS of VF {index}");
        let _ = write(&mut device, Place::Vf(index), 0x200, 0x100 + u32::from(index));
        assert_eq!(read(&mut device, Place::Pf, 0x13000 + 64 * u64::from(index)), 0x100 + u32::from(index));
    }
    let _ = disable(&mut device);
    assert_eq!(read(&mut device, Place::Vf(0), 0x10), u32::MAX, "there is no VF");
    assert_eq!(read(&mut device, Place::Pf, 8) >> 10 & 0xff, 0);
}

/// X15: queues of a pool.
#[test]
fn a_vf_reaches_its_own_registers_alone() {
    let (mut device, _) = enabled(63, 4);
    let others = |device: &Card| {
        let nic = device.nic().lock().save();
        let vfs: Vec<_> = nic.vfs.into_iter().enumerate().filter(|(index, _)| *index != 1).collect();
        let own = |offset: u32| match offset {
            // Queues 2 and 3 of the NIC, and what the PF has for the VF.
            0x1080..0x1100 | 0x6080..0x6100 | 0xea04 | 0x3404 | 0x18040..0x18080 | 0x19040..0x19080 => true,
            _ => false,
        };
        (vfs, nic.registers.into_iter().filter(|(offset, _)| !own(*offset)).collect::<Vec<_>>())
    };
    let before = others(&device);
    for offset in (0..SLICE).step_by(4) {
        let _ = write(&mut device, Place::Vf(1), offset, u32::MAX);
        let _ = write(&mut device, Place::Vf(1), offset, 0x5a5a_5a5a);
    }
    assert_eq!(others(&device), before);
    assert_eq!(read(&mut device, Place::Pf, 0x1080), 0x5a5a_5a00, "its own ring's base");
    assert_eq!(read(&mut device, Place::Vf(1), 0x1080), 0, "two queues are its own");
}

#[test]
fn larger_pages_leave_a_hole_behind_a_vfs_registers() {
    let (mut device, _) = device(2);
    let _ = write_config(&mut device, PF, SRIOV + 0x20, 0x10);
    set_master(&mut device, PF, true);
    let _ = enable(&mut device, 2);
    let window = WindowId::VfBar(REGISTERS_BAR);
    let mut data = [0; 4];
    let _ = device.mmio_write(window, 0x1_0200, &7u32.to_le_bytes());
    device.mmio_read(window, 0x1_0200, &mut data);
    assert_eq!(data, [7, 0, 0, 0], "VF 1 begins at 64 KiB");
    assert!(device.mmio_write(window, 0x4200, &[9; 4]).is_none());
    device.mmio_read(window, 0x4200, &mut data);
    assert_eq!((data, read(&mut device, Place::Pf, 0x13000)), ([0xff; 4], 0));
    device.mmio_read(WindowId::VfBar(VF_MSIX_BAR), 0x4000, &mut data);
    assert_eq!(data, [0; 4], "nothing follows the structures of MSI-X");
}

#[test]
fn only_reads_of_vcpus_have_side_effects() {
    let (mut device, _) = enabled(4, 4);
    let _ = write(&mut device, Place::Vf(1), 0x2fc, 1);
    let _ = write(&mut device, Place::Pf, 0x4b04, 1);
    let before = device.nic().lock().clone();
    for reg in Dword::all() {
        for rid in [PF, rid(0), rid(1)] {
            let _ = device.config_read(rid, reg);
        }
    }
    for vf in [None, Some(VfIndex(1))] {
        assert!(device.function_status(vf).is_some());
    }
    let (_, mut windows) = (messages(&device, Reach::Device), Vec::new());
    device.windows(&mut windows);
    assert!(device.config_is_static(PF) && device.config_is_static(rid(1)));
    device.pause();
    device.save().unwrap();
    assert_eq!(*device.nic().lock(), before);
    // EICR, SWSM and VFMAILBOX.
    for (place, offset, first, second) in
        [(Place::Pf, 0x800, 1 << 19, 0), (Place::Pf, 0x10140, 0, 1), (Place::Vf(1), 0x2fc, 1 << 4 | 1 << 6, 1 << 6)]
    {
        assert_eq!([(); 2].map(|()| read(&mut device, place, offset)), [first, second], "{offset:#x}");
    }
}

/// X30: EITR.
#[test]
fn an_interrupt_that_an_access_makes_wait_is_announced() {
    let _clock = crate::os::clock::testing::StoppedClock::new();
    let (mut device, path) = enabled(4, 4);
    for (offset, value) in [(0x110, 7), (0x120, 0x80), (0x820, 200), (0x108, 1)] {
        let _ = write(&mut device, Place::Vf(3), offset, value);
    }
    assert!(device.nic().queue_event(Direction::Receive, 6) && !device.nic().queue_event(Direction::Receive, 6));
    let began = device.nic().due();
    device.nic().flush(Some(Place::Vf(3)));
    assert!(began.is_some() && device.nic().due().is_none());
    for (offset, value) in [(0x10c, 1), (0x104, 1)] {
        let _ = write(&mut device, Place::Vf(3), offset, value);
    }
    assert_eq!(path.take_calls(), []);
    let _ = write(&mut device, Place::Vf(3), 0x108, 1);
    assert_eq!((path.take_calls(), device.nic().due()), (vec![Call::Moderation], began));
}

/// X27: rings.
#[test]
fn a_tail_rings_the_doorbell_of_its_queue_in_the_nic() {
    let (mut device, path) = enabled(4, 4);
    let rung = |direction, queue| [Call::Doorbell(Doorbell { direction, queue })];
    let _ = write(&mut device, Place::Vf(3), 0x2058, 5);
    assert_eq!(path.take_calls(), rung(Direction::Transmit, 7));
    let _ = write(&mut device, Place::Pf, 0xd018, 5);
    assert_eq!(path.take_calls(), rung(Direction::Receive, 64));
    let _ = write(&mut device, Place::Vf(3), 0x2098, 5);
    assert_eq!(path.take_calls(), [], "the VF has no third queue");
    let _ = write(&mut device, Place::Pf, 0xa204, 0x8000_0001);
    assert_eq!(path.take_calls(), [Call::Pools]);
}
