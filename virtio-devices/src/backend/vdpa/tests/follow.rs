//! A device whose function is behind an IOMMU: it can access what the function can, at any time.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use vm_memory::Permissions;

use super::*;
use crate::backend::Attention;
use crate::iommu::{Iommu, IommuAttachment, Range, Request};
use crate::memory::Translate;

const ENDPOINT: u32 = 0x100;
const PAGE: u64 = 4096;
/// The parts of [`shared_memory`].
const MEMORY: [(u64, u64); 2] = [(0, 0x10_0000), (1 << 32, 0x20_0000)];

struct Rig {
    iommu: Arc<Iommu>,
    attachment: IommuAttachment,
    kernel: Scripted,
    vdpa: Vdpa,
    dma: DmaSpace,
    /// The ranges that the kernel was sent, by first address.
    told: BTreeMap<u64, u64>,
}

impl Rig {
    /// A device that has been opened, and has not been started.
    fn new() -> Self {
        let (iommu, kernel, memory) = (Iommu::new(48), Scripted::default(), shared_memory());
        let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(ENDPOINT as u16));
        let vdpa = kernel.open_over(spec(1), &memory).unwrap();
        let dma = DmaSpace::translated(memory, Arc::clone(attachment.endpoint()) as Arc<dyn Translate>);
        Self { iommu, attachment, kernel, vdpa, dma, told: BTreeMap::new() }
    }

    fn start(&mut self) -> Result<(), StartError> {
        start_behind(&mut self.vdpa, &self.dma, &[queue(0, 0), queue(1, 0)], NEGOTIATED, true)
    }

    fn ask(&self, request: Request) -> bool {
        self.iommu.carry_out(request).is_ok()
    }

    fn attach(&self, domain: u32, bypass: bool) -> bool {
        self.ask(Request::Attach { domain, endpoint: ENDPOINT, bypass })
    }

    fn map(&self, first: u64, pages: u64, target: u64, access: Permissions) -> bool {
        let range = Range { first, last: first + pages * PAGE - 1 };
        self.ask(Request::Map { domain: 1, range, target, access })
    }

    fn unmap(&self, first: u64, pages: u64) -> bool {
        self.ask(Request::Unmap { domain: 1, range: Range { first, last: first + pages * PAGE - 1 } })
    }

    /// The ranges that the device can access, by first address, according to the kernel's messages. Refuses overlaps.
    fn reached(&mut self) -> Vec<(u64, u64)> {
        for asked in self.kernel.asked() {
            let Some((what, range)) = asked.split_once(' ') else { continue };
            let Some((first, len)) = range.split_once('+') else { continue };
            let [first, len] = [first, len].map(|hex| u64::from_str_radix(&hex[2..], 16).unwrap());
            match what {
                "map" => {
                    let before = self.told.range(..first + len).next_back();
                    assert!(before.is_none_or(|(at, size)| at + size <= first), "{asked}: {before:x?}");
                    self.told.insert(first, len);
                }
                "unmap" => self.told.retain(|at, size| first + len <= *at || at + *size <= first),
                _ => {}
            }
        }
        self.told.iter().map(|(first, len)| (*first, *len)).collect()
    }

    /// The pages that the function can access.
    fn expected(&self) -> Vec<(u64, u64)> {
        let endpoint = self.attachment.endpoint();
        let is_mapped = |page: &u64| endpoint.translate(page * PAGE, 1, Permissions::No).is_some();
        let target = |page: u64| endpoint.translate(page * PAGE, 1, Permissions::No).unwrap().0;
        let is_memory = |page: &u64| MEMORY.iter().any(|(at, len)| (*at..at + len).contains(&target(*page)));
        (0..64).filter(is_mapped).filter(is_memory).map(|page| (page * PAGE, PAGE)).collect()
    }

    /// The device's ranges, page by page.
    fn reached_pages(&mut self) -> Vec<(u64, u64)> {
        let ranges = self.reached();
        ranges.into_iter().flat_map(|(at, len)| (at..at + len).step_by(PAGE as usize).map(|at| (at, PAGE))).collect()
    }
}

#[test]
fn a_device_has_all_memory_in_bypass_and_mappings_in_a_domain() {
    let mut rig = Rig::new();
    assert_eq!(rig.reached(), MEMORY);
    rig.start().unwrap();
    assert_eq!(rig.reached(), MEMORY, "and nothing was unmapped in between");
    rig.vdpa.stop();
    assert!(rig.attach(1, false));
    assert_eq!(rig.reached(), []);
    assert!(rig.map(0x7000, 2, 0xf_f000, Permissions::ReadWrite), "of which the second page is no memory");
    assert!(rig.map(0x3000, 1, 1 << 32, Permissions::Read));
    assert_eq!(rig.reached(), [(0x3000, PAGE), (0x7000, PAGE)]);
    rig.start().unwrap();
    assert!(rig.unmap(0x7000, 2));
    assert_eq!(rig.reached(), [(0x3000, PAGE)]);
    assert!(rig.ask(Request::Detach { domain: 1, endpoint: ENDPOINT }));
    assert_eq!(rig.reached(), [], "all of memory is not given on the vCPU's thread");
    assert_eq!(rig.vdpa.attend().unwrap(), Attention::Restart);
    rig.vdpa.stop();
    rig.start().unwrap();
    assert_eq!(rig.reached(), MEMORY);
    assert_eq!(rig.vdpa.attend().unwrap(), Attention::Link(true), "and that is all");
    rig.iommu.set_bypass(false);
    assert_eq!(rig.reached(), []);
}

#[test]
fn a_mapping_that_a_device_refuses_fails_the_drivers_request() {
    let mut rig = Rig::new();
    rig.start().unwrap();
    assert!(rig.attach(1, false));
    rig.reached();
    rig.kernel.fail("map", libc::ENOMEM);
    assert!(!rig.map(0x3000, 1, 0x1000, Permissions::ReadWrite));
    rig.kernel.mend();
    assert!(rig.map(0x3000, 1, 0x2000, Permissions::ReadWrite), "nothing is there");
    rig.kernel.asked();
    assert!(rig.unmap(0x3000, 1));
    // A device that fails to drop a mapping is closed.
    assert!(rig.map(0x3000, 1, 0x2000, Permissions::ReadWrite));
    rig.kernel.fail("unmap", libc::EIO);
    assert!(rig.unmap(0x3000, 1));
    rig.vdpa.attend().unwrap_err();
    rig.kernel.mend();
    rig.vdpa.stop();
    rig.vdpa.recover().unwrap();
    (rig.told, _) = (BTreeMap::new(), rig.kernel.asked());
    rig.start().unwrap();
    assert_eq!(rig.reached(), [], "a device that was opened again follows");
    assert!(rig.map(0x3000, 1, 0x2000, Permissions::ReadWrite));
    assert_eq!(rig.reached(), [(0x3000, PAGE)]);
}

#[test]
fn a_device_that_is_closed_follows_no_more() {
    let mut rig = Rig::new();
    rig.start().unwrap();
    drop(std::mem::replace(&mut rig.vdpa, Scripted::default().open().unwrap()));
    rig.kernel.asked();
    assert!(rig.attach(1, false) && rig.map(0x3000, 1, 0x2000, Permissions::ReadWrite));
    assert!(rig.kernel.asked().is_empty());
}

#[test]
fn memory_that_comes_is_within_reach_as_far_as_it_is_mapped() {
    let mut rig = Rig::new();
    rig.start().unwrap();
    let all = rig.vdpa.memory.clone();
    let (less, _) = all.remove_region(vm_memory::GuestAddress(1 << 32), 0x20_0000).unwrap();
    rig.vdpa.set_memory(&less).unwrap();
    assert_eq!(rig.reached(), MEMORY[..1]);
    assert!(rig.attach(1, false) && rig.map(0x3000, 1, 1 << 32, Permissions::ReadWrite));
    assert_eq!(rig.reached(), []);
    rig.vdpa.set_memory(&all).unwrap();
    assert_eq!(rig.reached(), [(0x3000, PAGE)]);
    rig.vdpa.set_memory(&less).unwrap();
    assert_eq!(rig.reached(), []);
}

#[test]
fn memory_added_in_bypass_unmaps_nothing_from_running_queues() {
    let mut rig = Rig::new();
    rig.start().unwrap();
    let (old, new) = (rig.vdpa.memory.clone(), memory::grown(&rig.vdpa.memory));
    rig.kernel.asked();
    rig.vdpa.set_memory(&new).unwrap();
    assert_eq!(rig.kernel.asked(), ["iova-range", "batch-begin", "map 0x200000000+0x1000", "batch-end"]);
    rig.vdpa.set_memory(&old).unwrap();
    assert_eq!(rig.kernel.asked(), ["iova-range", "batch-begin", "unmap 0x200000000+0x1000", "batch-end"]);
    rig.kernel.fail("map", libc::ENOMEM);
    rig.vdpa.set_memory(&new).unwrap_err();
    let taken_back = rig.kernel.asked().into_iter().filter(|asked| asked.starts_with("unmap")).collect::<Vec<_>>();
    assert_eq!(taken_back, ["unmap 0x200000000+0x1000"], "what it cannot have is all that is taken");
    assert!(rig.vdpa.device.is_some());
}

#[test]
fn a_device_failing_to_unmap_is_reset_before_reply_and_closed() {
    let takes: [fn(&Rig); 4] = [
        |rig| assert!(rig.unmap(0x3000, 1)),
        |rig| assert!(rig.ask(Request::Detach { domain: 1, endpoint: ENDPOINT })),
        |rig| assert!(!rig.attach(2, false)),
        |rig| assert!(!rig.map(0x5000, 1, 0x2000, Permissions::ReadWrite)),
    ];
    for runs in [true, false] {
        for take in takes {
            let mut rig = Rig::new();
            rig.start().unwrap();
            assert!(rig.attach(1, false) && rig.map(0x3000, 1, 0x2000, Permissions::ReadWrite));
            if !runs {
                rig.vdpa.stop();
            }
            rig.kernel.asked();
            let status = || rig.kernel.0.lock().status;
            assert_eq!(status() != 0, runs);
            for request in ["map", "unmap"] {
                rig.kernel.fail(request, libc::EIO);
            }
            take(&rig);
            assert_eq!((status(), rig.kernel.asked().last().unwrap().as_str()), (0, "status 0"));
            rig.kernel.mend();
            if runs {
                rig.vdpa.attend().unwrap_err();
            } else {
                assert!(matches!(rig.start(), Err(StartError::Lost(_))));
            }
            assert_eq!(rig.kernel.0.lock().open, 0, "it is closed");
            rig.vdpa.stop();
            rig.vdpa.recover().unwrap();
            rig.start().unwrap();
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Attach(u32, bool),
    Detach(u32),
    Map(u64, u64, u64),
    Unmap(u64, u64),
    Bypass(bool),
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (1..3u32, prop::bool::weighted(0.2)).prop_map(|(domain, bypass)| Op::Attach(domain, bypass)),
        1 => (1..3u32).prop_map(Op::Detach),
        6 => (0..32u64, 1..4u64, 0xf0..0x110u64).prop_map(|(first, pages, target)| Op::Map(first, pages, target)),
        4 => (0..32u64, 1..8u64).prop_map(|(first, pages)| Op::Unmap(first, pages)),
        1 => any::<bool>().prop_map(Op::Bypass),
        1 => Just(Op::Restart),
    ]
}

proptest! {
    #[test]
    fn a_device_reaches_what_its_function_does_after_each_request(ops in prop::collection::vec(op(), 1..40)) {
        let mut rig = Rig::new();
        rig.start().unwrap();
        for op in ops {
            match op {
                Op::Attach(domain, bypass) => _ = rig.attach(domain, bypass),
                Op::Detach(domain) => _ = rig.ask(Request::Detach { domain, endpoint: ENDPOINT }),
                Op::Map(first, pages, target) => {
                    rig.map(first * PAGE, pages, target * PAGE, Permissions::ReadWrite);
                }
                Op::Unmap(first, pages) => _ = rig.unmap(first * PAGE, pages),
                Op::Bypass(bypass) => rig.iommu.set_bypass(bypass),
                Op::Restart => {}
            }
            if matches!(op, Op::Restart) || rig.vdpa.attend().unwrap() == Attention::Restart {
                rig.vdpa.stop();
                rig.start().unwrap();
            }
            if rig.attachment.endpoint().is_bypassed() {
                prop_assert_eq!(rig.reached(), MEMORY);
            } else {
                prop_assert_eq!(rig.reached_pages(), rig.expected(), "{:?}", op);
            }
        }
    }
}
