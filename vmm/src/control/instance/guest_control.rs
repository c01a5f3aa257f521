//! Requests of the guest about its VFs.
//!
//! [`guest_control::decide`] decides on settings; this file finds the functions that the guest names, and has what it
//! reads of them.

use std::collections::BTreeMap;

use pci::{Bdf, VfIndex};
use serde::Serialize;
use serde_json::Value;
use virtio_devices::SriovStatus;
use vm_api::channel::{
    Command, Hello, LISTED_VFS, List, Listed, MAX_REPLY, PfState, Refusal, RefusalCode, Set, VERSION, VfState, Welcome,
};
use vm_api::config::error::shortened;
use vm_api::config::net::guest_control::{GuestControl, GuestSettings};

use super::Instance;
use crate::api::Failure;
use crate::config::net::guest_control::{decide, effective, requested};
use crate::config::{MacAddress, NetConfig};
use crate::control::guest_vfs::{HostSide, backend_of, nic_of, resets_of};
use crate::control::in_force::{InForce, NewMac, host_settings, put_in_force};
use crate::control::set_vf;
use crate::devices::Plugged;
use crate::error_kind::ErrorKind;

/// Most characters of an address in a message.
const LONGEST: usize = 32;
/// Bytes of a reply besides its PFs.
const HEAD: usize = 256;

/// An enabled VF of a PF that the guest governs.
struct Found {
    pf: String,
    index: u16,
    address: Bdf,
    /// Number of its conventional resets.
    resets: u64,
}

impl Instance {
    /// Carries out a request of the guest. Returns the result for the guest.
    ///
    /// # Errors
    ///
    /// Fails without a change if the host does not allow it, or it cannot be enforced. Fails after the change, with
    /// [`RefusalCode::Failed`], if a worker still handles packets from before it after
    /// 100 ms.
    pub(crate) fn guest_request(&mut self, command: Command) -> Result<Value, Refusal> {
        self.end_stale_guest_settings();
        match command {
            Command::Hello(hello) => json(&self.welcome(&hello)?),
            Command::List(list) => json(&self.listed(&list)?),
            Command::Get(named) => json(&self.vf_state(&self.find_vf(&named.vf)?, true)?),
            Command::Set(set) => {
                let found = self.find_vf(&set.vf)?;
                self.set_by_guest(&found, &set)?;
                json(&self.vf_state(&found, true)?)
            }
            Command::Reset(named) => {
                let found = self.find_vf(&named.vf)?;
                self.apply_of_guest(&found, GuestSettings::default(), None)?;
                json(&self.vf_state(&found, true)?)
            }
        }
    }

    /// The PFs whose VFs the guest may govern.
    fn governed_pfs(&self) -> impl Iterator<Item = (&Plugged, &GuestControl)> {
        let devices = self.vm.iter().flat_map(|vm| vm.devices().iter());
        devices.filter_map(|plugged| Some((plugged, self.net_of(&plugged.plan().id)?.guest_control.as_ref()?)))
    }

    fn net_of(&self, pf: &str) -> Option<&NetConfig> {
        self.config().net.iter().find(|net| net.id.as_deref() == Some(pf))
    }

    fn welcome(&self, hello: &Hello) -> Result<Welcome, Refusal> {
        if hello.version != VERSION {
            let what = format!("version={}: only version {VERSION} is spoken; give that", hello.version);
            return Err(refusal(RefusalCode::Invalid, what));
        }
        let state = |(plugged, allowed): (&Plugged, &GuestControl)| PfState {
            pf: plugged.address().to_string(),
            vfs: visible(plugged),
            allowed: allowed.elements(),
        };
        // A reply has room for some 100 PFs with short lists.
        let mut room = MAX_REPLY - HEAD;
        let fits = |pf: &PfState| {
            let len = serde_json::to_string(pf).map_or(0, |text| text.len() + 1);
            room = room.saturating_sub(len);
            room > 0
        };
        Ok(Welcome { version: VERSION, pfs: self.governed_pfs().map(state).take_while(fits).collect() })
    }

    fn listed(&self, list: &List) -> Result<Listed, Refusal> {
        let missing = || {
            let name = shortened(&list.pf, LONGEST);
            refusal(RefusalCode::Missing, format!("pf={name}: no PF whose VFs the guest may govern; hello lists them"))
        };
        let address: Bdf = list.pf.parse().map_err(|_| missing())?;
        let (plugged, _) = self.governed_pfs().find(|(plugged, _)| plugged.address() == address).ok_or_else(missing)?;
        let end = visible(plugged);
        let last = list.from.saturating_add(LISTED_VFS).min(end);
        let found = (list.from..last).filter_map(|index| found(plugged, index));
        // Without counters, for which a reply has no room.
        let vfs = found.filter_map(|found| self.vf_state(&found, false).ok()).collect();
        Ok(Listed { vfs, next: (last < end && list.from < last).then_some(last) })
    }

    /// The enabled VF at `address`.
    fn find_vf(&self, address: &str) -> Result<Found, Refusal> {
        let missing = || {
            let name = shortened(address, LONGEST);
            let what = format!("vf={name}: no enabled VF that the guest may govern; list shows them");
            refusal(RefusalCode::Missing, what)
        };
        let bdf: Bdf = address.parse().map_err(|_| missing())?;
        let found = self.governed_pfs().find_map(|(plugged, _)| found(plugged, index_at(plugged, bdf)?));
        found.ok_or_else(missing)
    }

    fn set_by_guest(&mut self, found: &Found, set: &Set) -> Result<(), Refusal> {
        let now = self.guest_settings(&found.pf, found.index);
        let wanted = requested(&now, set);
        if wanted == now {
            return Ok(());
        }
        let config = {
            let side = self.host_side(found)?;
            let vf = (found.pf.as_str(), found.index);
            let is_taken = |mac| self.is_taken(&self.planned, mac, vf);
            decide(side.allowed, side.host(), &wanted, is_taken).map_err(|denial| denial.refusal)?
        };
        self.apply_of_guest(found, wanted, Some(config))
    }

    fn host_side(&self, found: &Found) -> Result<HostSide<'_>, Refusal> {
        let Found { pf, index, .. } = found;
        let plugged = self.vm.as_ref().and_then(|vm| vm.devices().find(pf));
        let backend = plugged.map(|plugged| backend_of(plugged, *index));
        let side =
            backend.and_then(|backend| HostSide::of(&self.planned, (pf, *index), self.host_link(pf, *index), backend));
        side.ok_or_else(|| gone(found))
    }

    /// Puts the settings `wanted` of the guest into force, with which the VF is as in `config`; `None` for the host's.
    fn apply_of_guest(
        &mut self,
        found: &Found,
        wanted: GuestSettings,
        config: Option<NetConfig>,
    ) -> Result<(), Refusal> {
        let Found { pf, index, resets, .. } = found;
        let before = self.settings(pf, *index);
        let now = self.guest_settings(pf, *index);
        let replaced = {
            let side = self.host_side(found)?;
            let config = config.unwrap_or_else(|| effective(&side.config, side.link, &wanted));
            let nic = nic_of(side.plan, &config, &wanted);
            let link = config.policy.link.unwrap_or_default();
            let mac_now = now.mac.map_or(side.plan.spec.mac, |mac| mac.0);
            let mac = if nic.spec.mac == mac_now { NewMac::Stays } else { NewMac::OfGuest(nic.spec.mac) };
            let host = (!wanted.is_empty()).then(|| host_settings(side.plan, side.link));
            let plugged = self.vm.as_ref().and_then(|vm| vm.devices().find(pf)).ok_or_else(|| gone(found))?;
            let new = InForce {
                vf: (pf, *index),
                policy: Some(&nic),
                port: Some(&nic),
                mac,
                link: Some(link),
                port_link: link,
                host,
                resets: Some(*resets),
            };
            put_in_force(plugged, &new).map_err(|failure| refused(found, &failure))?
        };
        self.set_guest_settings(pf, *index, wanted, *resets);
        let changed = set_vf::changes(&before, &self.settings(pf, *index));
        self.report_guest_change(pf, *index, &changed);
        set_vf::settle_of_guest(replaced, pf, (*index).into()).map_err(|failure| refused(found, &failure))
    }

    /// State of a VF as the guest reads it, with `counters` if it asks for them.
    fn vf_state(&self, found: &Found, counters: bool) -> Result<VfState, Refusal> {
        let Found { pf, index, address, .. } = found;
        let plugged = self.vm.as_ref().and_then(|vm| vm.devices().find(pf)).ok_or_else(|| gone(found))?;
        let policy = self.policy(pf, Some(*index));
        let seen = plugged.slot().with(|device| {
            let port = device.host_nic(Some(VfIndex(*index)))?;
            Some((MacAddress(port.mac()), port.link_up()))
        });
        let (mac, link_up) = seen.flatten().ok_or_else(|| gone(found))?;
        let counts = if counters { plugged.counted_vf(*index) } else { Vec::new() };
        Ok(VfState {
            vf: address.to_string(),
            index: *index,
            mac,
            vlan: policy.vlan,
            vlan_qos: policy.vlan_qos,
            vlan_proto: policy.vlan_proto,
            max_tx_rate: policy.max_tx_rate,
            link: policy.link,
            spoofchk: policy.spoofchk,
            link_up,
            set: policy.guest_set,
            counters: counts.into_iter().map(|(name, value)| (name.to_string(), value)).collect::<BTreeMap<_, _>>(),
        })
    }
}

/// Number of VFs of a PF that exist.
fn visible(plugged: &Plugged) -> u16 {
    let status = plugged.slot().with(|device| device.sriov_status()).flatten();
    status.map_or(0, SriovStatus::num_visible)
}

/// VF `index` of a PF, if it is enabled.
fn found(plugged: &Plugged, index: u16) -> Option<Found> {
    let (placement, pf) = (plugged.placement(), plugged.plan().id.clone());
    let address = placement.bdf(placement.vfs?.vf_rid(placement.rid, VfIndex(index)));
    Some(Found { pf, index, address, resets: resets_of(plugged, index)? })
}

/// Index of the VF of a PF at `address`, enabled or not.
fn index_at(plugged: &Plugged, address: Bdf) -> Option<u16> {
    let placement = plugged.placement();
    let vfs = placement.vfs.filter(|_| placement.segment == address.segment)?;
    let first = vfs.vf_rid(placement.rid, VfIndex(0)).to_bits();
    let distance = address.rid.to_bits().checked_sub(first)?;
    let index = if distance == 0 { 0 } else { distance.checked_div(vfs.vf_stride)? };
    let is_it = index < vfs.total_vfs && vfs.vf_rid(placement.rid, VfIndex(index)) == address.rid;
    is_it.then_some(index)
}

fn json(result: &impl Serialize) -> Result<Value, Refusal> {
    serde_json::to_value(result).map_err(|error| refusal(RefusalCode::Failed, error.to_string()))
}

fn refusal(code: RefusalCode, message: String) -> Refusal {
    Refusal { code, message }
}

fn gone(found: &Found) -> Refusal {
    refusal(RefusalCode::Missing, format!("vf={}: it is no longer enabled", found.address))
}

/// The failure of a change as the guest reads it, without the host's names.
fn refused(found: &Found, failure: &Failure) -> Refusal {
    let Found { pf, index, .. } = found;
    let code = match failure.kind {
        ErrorKind::NotFound => return gone(found),
        ErrorKind::Invalid => RefusalCode::Invalid,
        ErrorKind::Conflict => RefusalCode::Conflict,
        _ => RefusalCode::Failed,
    };
    let line = failure.chain.last().map_or("", String::as_str);
    let line = line.strip_prefix(&format!("pf={pf},index={index}")).unwrap_or(line);
    refusal(code, line.trim_start_matches([',', ':', ' ']).to_string())
}
