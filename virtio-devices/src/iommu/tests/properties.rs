//! Any requests, compared with a model that has only pages.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;
use vm_memory::Permissions;

use super::super::mappings::Range;
use super::super::request::Request;
use super::super::status::Status;
use super::super::{Endpoint, Iommu, IommuAttachment, IommuDevice};
use crate::memory::Translate;
use crate::{DeviceSpecific, VirtioDevice};

pub(super) const PAGE: u64 = 4096;
/// The pages that requests use.
pub(super) const PAGES: u64 = 8;
pub(super) const ENDPOINTS: usize = 3;
const DOMAINS: u32 = 3;

/// A mapping: its first and last page, the page of its target, and true if it is writable.
type Mapped = (u64, u64, u64, bool);

/// Domains as lists of page ranges, `None` for bypass domains.
#[derive(Default)]
pub(super) struct Model {
    domains: HashMap<u32, Option<Vec<Mapped>>>,
    attached: [Option<u32>; ENDPOINTS],
    bypass: bool,
}

impl Model {
    pub(super) fn carry_out(&mut self, op: Op) -> Status {
        match op {
            Op::Attach(domain, endpoint, bypass) => {
                if self.domains.get(&domain).is_some_and(|mappings| mappings.is_none() != bypass) {
                    return Status::Invalid;
                }
                self.attached[endpoint] = Some(domain);
                self.domains.entry(domain).or_insert((!bypass).then(Vec::new));
                self.sweep();
                Status::Ok
            }
            Op::Detach(domain, endpoint) => {
                if self.attached[endpoint] != Some(domain) {
                    return Status::Invalid;
                }
                self.attached[endpoint] = None;
                self.sweep();
                Status::Ok
            }
            Op::Map(domain, first, len, target, write) => match self.domains.get_mut(&domain) {
                None => Status::NoEntry,
                Some(None) => Status::Invalid,
                Some(Some(mappings)) => {
                    let last = first + len;
                    if mappings.iter().any(|mapped| mapped.0 <= last && first <= mapped.1) {
                        return Status::Invalid;
                    }
                    mappings.push((first, last, target, write));
                    Status::Ok
                }
            },
            Op::Unmap(domain, first, len) => match self.domains.get_mut(&domain) {
                None => Status::NoEntry,
                Some(None) => Status::Invalid,
                Some(Some(mappings)) => {
                    let last = first + len;
                    let touched = |mapped: &Mapped| mapped.0 <= last && first <= mapped.1;
                    let inside = |mapped: &Mapped| first <= mapped.0 && mapped.1 <= last;
                    if mappings.iter().any(|mapped| touched(mapped) && !inside(mapped)) {
                        return Status::Range;
                    }
                    mappings.retain(|mapped| !inside(mapped));
                    Status::Ok
                }
            },
            Op::Bypass(bypass) => {
                self.bypass = bypass;
                Status::Ok
            }
            Op::Reset => {
                *self = Self { bypass: self.bypass, ..Self::default() };
                Status::Ok
            }
        }
    }

    /// Removes domains without endpoints.
    fn sweep(&mut self) {
        let attached = self.attached;
        self.domains.retain(|domain, _| attached.contains(&Some(*domain)));
    }

    /// The target page of `page`, if the access is allowed.
    fn translate(&self, endpoint: usize, page: u64, write: bool) -> Option<u64> {
        match self.attached[endpoint].and_then(|domain| self.domains.get(&domain)) {
            None => self.bypass.then_some(page),
            Some(None) => Some(page),
            Some(Some(mappings)) => {
                let mapped = mappings.iter().find(|mapped| mapped.0 <= page && page <= mapped.1)?;
                (!write || mapped.3).then(|| mapped.2 + page - mapped.0)
            }
        }
    }

    /// Result of each endpoint at each page: of a read, and of a write.
    pub(super) fn seen(&self) -> Vec<Option<u64>> {
        let places = (0..ENDPOINTS).flat_map(|endpoint| (0..2 * PAGES).map(move |page| (endpoint, page)));
        places.flat_map(|(endpoint, page)| [false, true].map(|write| self.translate(endpoint, page, write))).collect()
    }

    /// The number of domains, and of mappings in all of them.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.domains.len(), self.domains.values().flatten().map(Vec::len).sum())
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    Attach(u32, usize, bool),
    Detach(u32, usize),
    Map(u32, u64, u64, u64, bool),
    Unmap(u32, u64, u64),
    Bypass(bool),
    Reset,
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let (domain, endpoint, page) = (0..DOMAINS, 0..ENDPOINTS, 0..PAGES);
    prop_oneof![
        4 => (domain.clone(), endpoint.clone(), prop::bool::weighted(0.2)).prop_map(|(d, e, b)| Op::Attach(d, e, b)),
        2 => (domain.clone(), endpoint).prop_map(|(d, e)| Op::Detach(d, e)),
        8 => (domain.clone(), page.clone(), 0..3u64, 0..64u64, any::<bool>())
            .prop_map(|(d, first, len, target, write)| Op::Map(d, first, len, target, write)),
        6 => (domain, page, 0..5u64).prop_map(|(d, first, len)| Op::Unmap(d, first, len)),
        1 => any::<bool>().prop_map(Op::Bypass),
        1 => Just(Op::Reset),
    ]
}

fn endpoint(index: usize) -> u32 {
    0x100 + index as u32
}

pub(super) fn iommu() -> (Arc<Iommu>, Vec<IommuAttachment>) {
    let iommu = Iommu::new(64);
    let attachment = (0..ENDPOINTS).map(|n| iommu.add_endpoint(0, pci::Rid::from_bits(0x100 + n as u16))).collect();
    iommu.set_bypass(false);
    (iommu, attachment)
}

pub(super) fn carry_out(iommu: &Iommu, op: Op) -> Status {
    let pages = |first: u64, len: u64| Range { first: first * PAGE, last: (first + len) * PAGE + (PAGE - 1) };
    let request = match op {
        Op::Attach(domain, index, bypass) => Request::Attach { domain, endpoint: endpoint(index), bypass },
        Op::Detach(domain, index) => Request::Detach { domain, endpoint: endpoint(index) },
        Op::Map(domain, first, len, target, write) => {
            let access = if write { Permissions::ReadWrite } else { Permissions::Read };
            Request::Map { domain, range: pages(first, len), target: target * PAGE, access }
        }
        Op::Unmap(domain, first, len) => Request::Unmap { domain, range: pages(first, len) },
        Op::Bypass(bypass) => {
            iommu.set_bypass(bypass);
            return Status::Ok;
        }
        Op::Reset => {
            iommu.reset();
            return Status::Ok;
        }
    };
    iommu.carry_out(request).map_or_else(|status| status, |()| Status::Ok)
}

/// Result of each endpoint at each page: of a read, and of a write.
pub(super) fn seen(attachment: &[IommuAttachment]) -> Vec<Option<u64>> {
    seen_by(attachment.iter().map(IommuAttachment::endpoint))
}

pub(super) fn seen_by<'e>(endpoints: impl IntoIterator<Item = &'e Arc<Endpoint>>) -> Vec<Option<u64>> {
    let at = |endpoint: &Endpoint, page: u64, access| {
        let _pass = endpoint.begin();
        endpoint.translate(page * PAGE, PAGE, access).map(|(target, len)| {
            assert_eq!(len, PAGE);
            target / PAGE
        })
    };
    let all = endpoints.into_iter().flat_map(|endpoint| (0..2 * PAGES).map(move |page| (endpoint, page)));
    all.flat_map(|(endpoint, page)| [Permissions::Read, Permissions::Write].map(|access| at(endpoint, page, access)))
        .collect()
}

proptest! {
    #[test]
    fn requests_do_what_they_do_to_a_model_of_pages(ops in prop::collection::vec(op(), 1..60)) {
        let (mut model, (iommu, attachment)) = (Model::default(), iommu());
        for op in ops {
            prop_assert_eq!(carry_out(&iommu, op), model.carry_out(op), "{:?}", op);
            prop_assert_eq!(seen(&attachment), model.seen(), "{:?}", op);
            prop_assert_eq!(iommu.table.lock().counts(), model.counts());
        }
    }

    #[test]
    fn a_state_that_is_saved_and_restored_is_the_same(ops in prop::collection::vec(op(), 1..40)) {
        let (before, old) = iommu();
        ops.into_iter().for_each(|op| _ = carry_out(&before, op));
        let state = IommuDevice::new("iommu", before).save();
        let json = serde_json::to_string(&state).unwrap();
        let (after, new) = iommu();
        let mut device = IommuDevice::new("iommu", after);
        device.restore(&serde_json::from_str::<DeviceSpecific>(&json).unwrap(), Some(u64::MAX)).unwrap();
        prop_assert_eq!(device.save(), state);
        prop_assert_eq!(seen(&new), seen(&old));
    }
}

#[test]
fn impossible_domains_are_refused_and_leave_power_on_state() {
    let (iommu, attachment) = iommu();
    let mut device = IommuDevice::new("iommu", iommu);
    let restore = |device: &mut IommuDevice, domains: &str| {
        let json = format!(r#"{{"iommu":{{"bypass":false,"domains":[{domains}]}}}}"#);
        device.restore(&serde_json::from_str(&json).unwrap(), Some(u64::MAX)).err().map(|error| error.to_string())
    };
    let mapping =
        |first: u64, last: u64| format!(r#"{{"first":{first},"last":{last},"target":0,"read":true,"write":true}}"#);
    let impossible = Some("saved state with an impossible value in an IOMMU's domains".to_string());
    let page = mapping(0, 4095);
    for domains in [
        r#"{"number":1,"endpoints":[9],"mappings":null}"#.to_string(),
        format!(r#"{{"number":1,"endpoints":[],"mappings":[{page}]}}"#),
        format!(r#"{{"number":1,"endpoints":[256],"mappings":[{page},{page}]}}"#),
        format!(r#"{{"number":1,"endpoints":[256],"mappings":[{}]}}"#, mapping(4096, 0)),
        format!(r#"{{"number":1,"endpoints":[256],"mappings":[{}]}}"#, mapping(0, 1)),
        r#"{"number":65536,"endpoints":[256],"mappings":null}"#.to_string(),
    ] {
        assert_eq!(restore(&mut device, &domains), impossible, "{domains}");
        assert_eq!(device.save(), DeviceSpecific::PowerOn);
    }
    assert_eq!(restore(&mut device, &format!(r#"{{"number":1,"endpoints":[256],"mappings":[{page}]}}"#)), None);
    assert_eq!(seen(&attachment)[0], Some(0));
}
