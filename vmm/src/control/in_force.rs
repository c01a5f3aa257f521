//! Putting settings of a VF into force, whether a client of the host or the guest has given them.

use pci::VfIndex;
use virtio_devices::{HostNic, HostSettings, PortSettings, Replaced, Status, Switch};

use crate::api::{Failure, SetVf};
use crate::config::net::switch;
use crate::config::{BackendPlan, LinkPolicy, MacAddress, NicPlan};
use crate::control::set_vf;
use crate::devices::Plugged;
use crate::error_kind::ErrorKind;

/// Settings to put into force, all of one VF of a PF.
pub(crate) struct InForce<'a> {
    /// Id of the PF, and index of the VF.
    pub vf: (&'a str, u16),
    /// Plan whose policy replaces the present one, if that changes.
    pub policy: Option<&'a NicPlan>,
    /// Plan for its port on a switch, if it is one; `None` if there is no plan.
    pub port: Option<&'a NicPlan>,
    /// Address.
    pub mac: NewMac<'a>,
    /// Link, if that changes.
    pub link: Option<LinkPolicy>,
    /// Link in any case.
    pub port_link: LinkPolicy,
    /// The host's settings, while the guest has others.
    pub host: Option<HostSettings>,
    /// Number of the VF's conventional resets, if the settings are for the VF that has existed since the last of them.
    pub resets: Option<u64>,
}

/// A change of an address.
pub(crate) enum NewMac<'a> {
    /// None.
    Stays,
    /// By the host: the request, and the plans before and after it.
    OfHost(&'a SetVf, (&'a NicPlan, &'a NicPlan)),
    /// By the guest, which makes its driver use the new one.
    OfGuest([u8; 6]),
}

/// The host's settings in `plan`, with its link.
pub(crate) fn host_settings(plan: &NicPlan, link: LinkPolicy) -> HostSettings {
    HostSettings {
        mac: (!plan.backend.has_own_mac()).then_some(plan.spec.mac),
        policy: plan.spec.policy.clone(),
        limits: plan.spec.limits,
        link_up: link != LinkPolicy::Down,
        follows_tap: link == LinkPolicy::Auto,
    }
}

/// The error for a VF that does not exist.
pub(crate) fn no_vf(pf: &str, index: u16) -> Failure {
    let what = "there is no such VF; vm.info lists them";
    Failure::new(ErrorKind::NotFound, format!("pf={pf},index={index}: {what}"))
}

/// Changes a VF. Takes the device's lock, which vCPUs take, for this VF alone. Returns a handle to wait for frames
/// under the earlier settings.
///
/// # Errors
///
/// Fails without a change if there is no such VF, or no longer the one that the settings are for, or it cannot have the
/// address.
pub(crate) fn put_in_force(plugged: &Plugged, new: &InForce<'_>) -> Result<Replaced, Failure> {
    let (pf, index) = new.vf;
    let set = plugged.slot().with(|device| {
        let vf = Some(VfIndex(index));
        let status = device.function_status(vf);
        if new
            .resets
            .is_some_and(|resets| status.is_none_or(|status| !status.exists || status.conventional_resets != resets))
        {
            return Err(no_vf(pf, index));
        }
        let driven = status.is_some_and(|status| status.driver.contains(Status::DRIVER));
        let port = device.host_nic(vf).ok_or_else(|| no_vf(pf, index))?;
        // All under this lock, also on the switch: a VF that is disabled has the host's settings from then on.
        port.begin_changes();
        let changed = change(port, plugged, new, driven);
        let table = port.end_changes();
        changed.map(|replaced| replaced.and(table))
    });
    set.unwrap_or_else(|| Err(no_vf(pf, index)))
}

/// Makes the changes, without a table of its switch. Fails without a change.
fn change(port: &mut dyn HostNic, plugged: &Plugged, new: &InForce<'_>, driven: bool) -> Result<Replaced, Failure> {
    let index = new.vf.1;
    let mut replaced = match new.mac {
        NewMac::Stays => Replaced::default(),
        NewMac::OfHost(change, plans) => set_vf::set_mac(port, (change, index), plans, driven)?,
        NewMac::OfGuest(mac) => set_mac_for_guest(port, new.vf, mac)?,
    };
    if let Some(link) = new.link {
        port.follow_tap(link == LinkPolicy::Auto);
        replaced = replaced.and(port.set_link(link != LinkPolicy::Down));
    }
    if let Some(plan) = new.policy {
        replaced = replaced.and(port.set_policy(plan.spec.policy.clone(), plan.spec.limits));
    }
    if let Some((switch, settings)) = new.port.and_then(|plan| on_switch(plugged, plan, new.port_link)) {
        switch.prepare_port(switch::port_of(index), settings);
    }
    port.return_to(new.host.clone());
    Ok(replaced)
}

fn set_mac_for_guest(port: &mut dyn HostNic, (pf, index): (&str, u16), mac: [u8; 6]) -> Result<Replaced, Failure> {
    let mac = MacAddress(mac);
    let set = port.set_mac_for_guest(mac.0);
    set.map_err(|error| Failure::new(error.kind().into(), format!("pf={pf},index={index},mac={mac}: {error}")))
}

/// Applies the plan's settings to a VF that is a port of a switch, except for the link, which clients and the guest
/// set.
pub(crate) fn set_port(plugged: &Plugged, index: u16, plan: &NicPlan, link: LinkPolicy) -> Replaced {
    let on_switch = on_switch(plugged, plan, link);
    on_switch.map(|(switch, settings)| switch.set_port(switch::port_of(index), settings)).unwrap_or_default()
}

/// The switch that a VF is a port of, if it is, and the plan's settings for it.
fn on_switch<'p>(plugged: &'p Plugged, plan: &NicPlan, link: LinkPolicy) -> Option<(&'p Switch, PortSettings)> {
    let BackendPlan::Port(settings) = &plan.backend else { return None };
    let settings = PortSettings { follows_uplink: link == LinkPolicy::Auto, ..*settings };
    plugged.switch().map(|switch| (switch, settings))
}
