//! Settings that the guest has made for its VFs: kept besides the configuration, which stays the host's, and decided
//! again whenever the host changes something.
//!
//! They belong to a VF from its enabling to its disabling. The device counts the latter in the very access that
//! disables the VF, and returns to the host's settings in it; settings with an older count have ended.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use pci::VfIndex;
use virtio_devices::Replaced;
use vm_api::channel::Notice;
use vm_api::config::net::guest_control::GuestSettings;

use super::Instance;
use crate::api::Failure;
use crate::config::net::guest_control;
use crate::config::{LinkPolicy, MacAddress, NicPlan, PlannedVm};
use crate::control::guest_reports::{GuestChange, Report};
use crate::control::guest_vfs::{GuestVf, HostSide, backend_of, config_of, is_planned, nic_of, resets_of};
use crate::control::in_force::{InForce, NewMac, host_settings, put_in_force};
use crate::control::set_vf;
use crate::devices::Plugged;
use crate::machine_state::GuestVfState;
use crate::telemetry::events::Source;

/// A VF for which the guest has made settings, after a change by the host.
pub(super) struct Governed {
    /// Plan with the guest's settings, before the change.
    pub before: NicPlan,
    /// Plan with those that remain.
    pub nic: NicPlan,
    /// Link with those that remain.
    pub link: LinkPolicy,
    /// Settings that remain.
    pub remaining: GuestSettings,
    /// Keys of those that ended.
    pub ended: Vec<&'static str>,
    /// The VF's number of resets that the settings are for, if it is known: a VF that was disabled since has none.
    pub resets: Option<u64>,
}

impl Instance {
    /// The link of VF `index` of `pf` that the host has set.
    pub(super) fn host_link(&self, pf: &str, index: u16) -> LinkPolicy {
        if let Some(link) = self.links.get(&(pf.to_string(), index)) {
            return *link;
        }
        let net = self.config().net.iter().find(|net| net.id.as_deref() == Some(pf));
        net.and_then(|net| net.vf(index)).and_then(|vf| vf.policy.link).unwrap_or_default()
    }

    /// Settings of the guest for VF `index` of `pf` that have not ended.
    pub(super) fn guest_settings(&self, pf: &str, index: u16) -> GuestSettings {
        let known = self.guest_vfs.vfs.get(&(pf.to_string(), index));
        let live = known.filter(|known| {
            let plugged = self.vm.as_ref().and_then(|vm| vm.devices().find(pf));
            plugged.and_then(|plugged| resets_of(plugged, index)) == Some(known.resets)
        });
        live.map(|known| known.settings.clone()).unwrap_or_default()
    }

    /// Stores the settings of the guest for VF `index` of `pf`, which has had `resets` conventional resets.
    pub(super) fn set_guest_settings(&mut self, pf: &str, index: u16, settings: GuestSettings, resets: u64) {
        let key = (pf.to_string(), index);
        if settings.is_empty() {
            self.guest_vfs.vfs.remove(&key);
        } else {
            self.guest_vfs.vfs.insert(key, GuestVf { settings, resets });
        }
    }

    /// Keeps `remaining` of the settings of the guest for VF `index` of `pf`.
    pub(super) fn keep_guest_settings(&mut self, pf: &str, index: u16, remaining: GuestSettings) {
        if let Some(known) = self.guest_vfs.vfs.get(&(pf.to_string(), index)) {
            self.set_guest_settings(pf, index, remaining, known.resets);
        }
    }

    /// True if `mac` is the address of another function of the VM than VF `index` of `pf`.
    pub(super) fn is_taken(&self, planned: &PlannedVm, mac: MacAddress, (pf, index): (&str, u16)) -> bool {
        let mut others = self.guest_vfs.vfs.iter().filter(|((id, vf), _)| (id.as_str(), *vf) != (pf, index));
        others.any(|(_, other)| other.settings.mac == Some(mac)) || is_planned(planned, mac, (pf, index))
    }

    /// The VFs `indices` of a PF for which the guest has made settings, decided again for `planned` if the
    /// configuration changes, and the host's new `link` if that does.
    pub(super) fn governed_after(
        &self,
        plugged: &Plugged,
        planned: Option<&PlannedVm>,
        (indices, link): (RangeInclusive<u16>, Option<LinkPolicy>),
    ) -> HashMap<u16, Governed> {
        let pf = &plugged.plan().id;
        let planned = planned.unwrap_or(&self.planned);
        let known = self.guest_vfs.vfs.keys().filter(|(id, index)| id == pf && indices.contains(index));
        let governed = known.filter_map(|(_, index)| {
            let settings = self.guest_settings(pf, *index);
            let link = link.unwrap_or_else(|| self.host_link(pf, *index));
            let is_live = !settings.is_empty();
            is_live.then(|| Some((*index, self.governed(plugged, planned, (*index, link), &settings)?))).flatten()
        });
        governed.collect()
    }

    /// Decides again on `settings` of the guest for VF `index`, whose host has set `link`, in `planned`.
    fn governed(
        &self,
        plugged: &Plugged,
        planned: &PlannedVm,
        (index, link): (u16, LinkPolicy),
        settings: &GuestSettings,
    ) -> Option<Governed> {
        let pf = &plugged.plan().id;
        let now = set_vf::plan_of(&self.planned, pf, index)?;
        let net = self.config().net.iter().find(|net| net.id.as_deref() == Some(pf))?;
        let config = guest_control::effective(&config_of(net, index), link, settings);
        let before = nic_of(now, &config, settings);
        let resets = self.guest_vfs.vfs.get(&(pf.clone(), index)).map(|known| known.resets);
        let Some(side) = HostSide::of(planned, (pf, index), link, backend_of(plugged, index)) else {
            let nic = set_vf::plan_of(planned, pf, index)?.clone();
            let ended = settings.keys();
            return Some(Governed { before, nic, link, remaining: GuestSettings::default(), ended, resets });
        };
        let is_taken = |mac| self.is_taken(planned, mac, (pf, index));
        let (remaining, config, ended) = guest_control::decide_again(side.allowed, side.host(), settings, is_taken);
        let nic = nic_of(side.plan, &config, &remaining);
        let link = config.policy.link.unwrap_or_default();
        Some(Governed { before, nic, link, remaining, ended, resets })
    }

    /// Decides again on the settings of the guest that `concerns` returns true for, and ends those that the host no
    /// longer allows.
    pub(crate) fn decide_again(&mut self, concerns: impl Fn(&str, &GuestSettings) -> bool) {
        let all = self.guest_vfs.vfs.iter();
        let keys: Vec<_> =
            all.filter(|((pf, _), known)| concerns(pf, &known.settings)).map(|(key, _)| key.clone()).collect();
        for (pf, index) in keys {
            let Some(plugged) = self.vm.as_ref().and_then(|vm| vm.devices().find(&pf)) else { continue };
            let link = self.host_link(&pf, index);
            let settings = self.guest_settings(&pf, index);
            let Some(governed) = self.governed(plugged, &self.planned, (index, link), &settings) else { continue };
            if governed.ended.is_empty() {
                continue;
            }
            let before = self.settings(&pf, index);
            let Some(host) = set_vf::plan_of(&self.planned, &pf, index) else { continue };
            let settled = put_governed(plugged, &governed, (&pf, index), (host, link));
            let settled = settled.and_then(|replaced| set_vf::settle(replaced, &pf, index.into()));
            if let Err(failure) = settled {
                log::warn!("{}", failure.chain.join(": "));
            }
            self.keep_guest_settings(&pf, index, governed.remaining);
            let changed = set_vf::changes(&before, &self.settings(&pf, index));
            self.tell_change(&pf, index, ("host", &changed), 0);
        }
    }

    /// Forgets settings of the guest whose VFs have ceased to exist since, and reports it. The devices have returned to
    /// the host's settings by themselves.
    pub(super) fn end_stale_guest_settings(&mut self) {
        let all = self.guest_vfs.vfs.keys();
        let stale: Vec<_> = all.filter(|(pf, index)| self.guest_settings(pf, *index).is_empty()).cloned().collect();
        for (pf, index) in stale {
            let Some(GuestVf { settings, .. }) = self.guest_vfs.vfs.remove(&(pf.clone(), index)) else { continue };
            let before = self.settings_with(&pf, index, &settings);
            let changed = set_vf::changes(&before, &self.settings(&pf, index));
            self.report_guest_change(&pf, index, &changed);
        }
    }

    /// Reports a change by the guest, now or by [`Self::report_late`]. `changed` is [`set_vf::NOTHING`] for none.
    pub(super) fn report_guest_change(&mut self, pf: &str, index: u16, changed: &str) {
        if changed == set_vf::NOTHING {
            return;
        }
        let change = GuestChange { pf: pf.to_string(), index, changed: changed.to_string() };
        let report = self.guest_vfs.reports.add(change, Instant::now());
        self.report(report);
    }

    /// Time until [`Self::report_late`] has something to report, if it has.
    pub(crate) fn wait_to_report(&self, now: Instant) -> Option<Duration> {
        self.guest_vfs.reports.wait(now)
    }

    /// Reports the last change by the guest, if it was one too many at its time.
    pub(crate) fn report_late(&mut self, now: Instant) {
        let report = self.guest_vfs.reports.due(now);
        self.report(report);
    }

    /// Reports the last change of a guest that ends.
    pub(crate) fn report_rest(&mut self) {
        let report = self.guest_vfs.reports.end();
        self.report(report);
    }

    fn report(&self, report: Option<Report>) {
        if let Some((GuestChange { pf, index, changed }, left_out)) = report {
            self.tell_change(&pf, index, ("guest", &changed), left_out);
        }
    }

    fn tell_change(&self, pf: &str, index: u16, (by, changed): (&str, &str), left_out: u64) {
        let (index_text, count) = (index.to_string(), left_out.to_string());
        let mut properties = vec![("id", pf), ("index", index_text.as_str()), ("by", by), ("changed", changed)];
        if left_out > 0 {
            properties.push(("left_out", &count));
        }
        self.events.tell(Source::Sriov, "vf-policy", &properties);
        self.notify_guest_of(pf, index..=index, (by, changed));
    }

    /// Notifies the guest of a change of VFs of `pf` that exist, if it governs them.
    pub(super) fn notify_guest_of(&self, pf: &str, indices: RangeInclusive<u16>, (by, changed): (&str, &str)) {
        let net = self.config().net.iter().find(|net| net.id.as_deref() == Some(pf));
        let plugged = self.vm.as_ref().and_then(|vm| vm.devices().find(pf));
        let (Some(_), Some(plugged)) = (net.and_then(|net| net.guest_control.as_ref()), plugged) else { return };
        let Some(vfs) = plugged.placement().vfs.filter(|_| changed != set_vf::NOTHING) else { return };
        for index in indices.filter(|index| *index < vfs.total_vfs) {
            if resets_of(plugged, index).is_some() {
                let address = plugged.placement().bdf(vfs.vf_rid(plugged.placement().rid, VfIndex(index)));
                let (vf, by, changed) = (address.to_string(), by.to_string(), changed.to_string());
                self.notify_guest(Notice { vf, by, changed });
            }
        }
    }

    /// Settings of the guest, for a saved state.
    pub(crate) fn saved_guest_settings(&self) -> Vec<GuestVfState> {
        let state = |(id, vf): &(String, u16)| {
            let settings = self.guest_settings(id, *vf);
            (!settings.is_empty()).then(|| GuestVfState { id: id.clone(), vf: *vf, settings })
        };
        let mut all: Vec<_> = self.guest_vfs.vfs.keys().filter_map(state).collect();
        all.sort_by(|one, other| (&one.id, one.vf).cmp(&(&other.id, other.vf)));
        all
    }

    /// Takes over settings of the guest from a saved state, of which the devices have been made with
    /// [`prepare`](crate::control::guest_vfs::prepare): decides again on each. The VM is paused.
    pub(super) fn restore_guest_settings(&mut self, saved: &[GuestVfState]) {
        for GuestVfState { id, vf, settings } in saved {
            let Some(plugged) = self.vm.as_ref().and_then(|vm| vm.devices().find(id)) else { continue };
            let (link, resets) = (self.host_link(id, *vf), resets_of(plugged, *vf));
            let Some(host) = set_vf::plan_of(&self.planned, id, *vf) else { continue };
            let Some(mut governed) = self.governed(plugged, &self.planned, (*vf, link), settings) else { continue };
            if resets.is_none() {
                // Untrusted: a VF that does not exist has none.
                governed = Governed { nic: host.clone(), link, remaining: GuestSettings::default(), ..governed };
            }
            if !governed.ended.is_empty() {
                let keys = governed.ended.join(", ");
                log::warn!("{id}v{vf}: the configuration no longer lets the guest set {keys}; the host's values apply");
            }
            match put_governed(plugged, &governed, (id, *vf), (host, link)) {
                // No worker handles a frame.
                Ok(replaced) => drop(replaced),
                Err(failure) => log::warn!("{}", failure.chain.join(": ")),
            }
            self.set_guest_settings(id, *vf, governed.remaining, resets.unwrap_or_default());
        }
    }
}

/// Puts the settings of the guest that remain for a VF into force.
pub(super) fn put_governed(
    plugged: &Plugged,
    governed: &Governed,
    vf: (&str, u16),
    (host, link): (&NicPlan, LinkPolicy),
) -> Result<Replaced, Failure> {
    let Governed { before, nic, link: effective, remaining, resets, .. } = governed;
    let mac = if before.spec.mac == nic.spec.mac { NewMac::Stays } else { NewMac::OfGuest(nic.spec.mac) };
    let host = (!remaining.is_empty()).then(|| host_settings(host, link));
    let (policy, port) = (Some(nic), Some(nic));
    put_in_force(
        plugged,
        &InForce { vf, policy, port, mac, link: Some(*effective), port_link: *effective, host, resets: *resets },
    )
}
