//! Guest memory that changes while a device reaches it.

use std::sync::Arc;

use vm_memory::{FileOffset, GuestAddress};

use super::*;
use crate::{GuestMap, GuestRegion};

/// `memory` with a further region at 8 GiB.
pub(super) fn grown(memory: &GuestMap) -> GuestMap {
    let file = rustix::fs::memfd_create("more-memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 0x1000).unwrap();
    let file = FileOffset::new(file.into(), 0);
    memory.insert_region(Arc::new(GuestRegion::from_range(GuestAddress(8 << 30), 0x1000, Some(file)).unwrap())).unwrap()
}

#[test]
fn a_running_device_is_given_what_came_and_nothing_that_it_has() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    kernel.asked();
    let (old, new) = (vdpa.memory.clone(), grown(&vdpa.memory));
    vdpa.set_memory(&new).unwrap();
    assert_eq!(kernel.asked(), ["iova-range", "batch-begin", "map 0x200000000+0x1000", "batch-end"]);
    vdpa.set_memory(&new).unwrap();
    assert_eq!(kernel.iotlb_updates(), 0);
    kernel.asked();
    vdpa.set_memory(&old).unwrap();
    assert_eq!(kernel.asked(), ["iova-range", "batch-begin", "unmap 0x200000000+0x1000", "batch-end"]);
}

#[test]
fn new_memory_that_the_device_cannot_reach_changes_nothing() {
    let kernel = Scripted::new(|script| script.iova = 0..=0x1_ffff_ffff);
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    kernel.asked();
    let new = grown(&vdpa.memory);
    let error = vdpa.set_memory(&new).unwrap_err().to_string();
    assert!(error.starts_with("cannot have the device reach the guest's new memory: "), "{error}");
    assert_eq!(kernel.asked(), ["iova-range"]);
    assert!(vdpa.device.is_some());
}

#[test]
fn refused_new_memory_is_unmapped_and_the_device_stays_open() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    kernel.asked();
    kernel.fail("map", libc::ENOMEM);
    let new = grown(&vdpa.memory);
    assert!(vdpa.set_memory(&new).is_err());
    let (unmapped, began, ended) = ("unmap 0x200000000+0x1000", "batch-begin", "batch-end");
    assert_eq!(kernel.asked()[1..], [began, "map 0x200000000+0x1000", ended, began, unmapped, ended]);
    assert!(vdpa.device.is_some());
    kernel.mend();
    vdpa.set_memory(&new).unwrap();
    assert_eq!(kernel.iotlb_updates(), 1);
}

#[test]
fn failed_unmap_reopens_the_device_with_the_full_map() {
    let kernel = Scripted::default();
    let mut vdpa = kernel.open().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    let new = grown(&vdpa.memory);
    kernel.fail("map", libc::ENOMEM);
    kernel.fail("unmap", libc::EIO);
    assert!(vdpa.set_memory(&new).is_err() && vdpa.device.is_none());
    kernel.mend();
    vdpa.set_memory(&new).unwrap();
    kernel.asked();
    vdpa.recover().unwrap();
    assert_eq!(kernel.iotlb_updates(), 3);
}
