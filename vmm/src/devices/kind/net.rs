//! NICs, and PFs with their VFs.

use std::collections::HashSet;
use std::sync::Arc;

use pci::VfIndex;
use virtio_devices::{Net, NetSriov, Switch};

use super::site::{Opened, Site};
use crate::config::{
    BackendPlan, MissingBackend, NetPlan, NicPlan, SwitchPlan, UplinkPlan, Vhost, VhostMode, net::switch,
};
use crate::devices::backends::{BackendOpener, NicSite, OF_SOCKET_OR_DEVICE, absent};
use crate::devices::counters::NicCounters;
use crate::devices::error::DeviceError;
use crate::devices::handle::{Handle, NetHandle};
use crate::devices::missing;
use crate::devices::passed_taps::TapOf;
use crate::devices::vhost_user_backends::function_option;
use crate::landlock::{Missing, READ, Rule, WRITE, sysfs};
use crate::pci_host::device_watch::{backend_observer, tell_backend};
use crate::pci_host::failure_watch::FailureWatch;
use crate::pci_host::policy_watch::PolicyWatch;

/// For a port of a switch: the doorbell of its queues.
const OF_PORT: u64 = 1;
/// For a worker of a switch: its poll set and its wake-up eventfd.
const OF_SWITCH_WORKER: u64 = 2;
/// For the uplink of a switch: the tap, a passed descriptor, and its watch.
const OF_UPLINK: u64 = 3;

pub(super) fn open(net: &NetPlan, site: &Site<'_>, opener: &mut BackendOpener<'_>) -> Result<Opened, DeviceError> {
    let Site { plan, placement, host } = *site;
    let failure_watch = FailureWatch::of_nic(net.id(), &host.events);
    let switch = opener.switch(net).map_err(|error| DeviceError::Backend { option: site.option(), error })?;
    if let Some(switch) = &switch {
        failure_watch.observe_uplink(switch);
        let uplink = switch.uplink_name().unwrap_or_default();
        switch.observe_uplink_loss(backend_observer(net.id(), None, uplink, &host.events));
    }
    let functions = Functions {
        site,
        net,
        switch: switch.as_ref(),
        policy_watch: PolicyWatch::new(net.id(), &host.events),
        failure_watch,
    };
    let pf = functions.open(None, &net.pf, opener)?;
    let vfs = (0..).map(VfIndex).zip(&net.vfs).map(|(index, vf)| functions.open(Some(index), vf, opener));
    let vfs = vfs.collect::<Result<Vec<_>, DeviceError>>()?;
    if let Some(error) = opener.take_without_vhost() {
        log::warn!("{}: vhost=auto: this program moves the packets itself: {error}", site.option());
    }
    let nets = std::iter::once(&pf).chain(&vfs);
    let counters = NicCounters::of(nets.zip(net.functions().map(|function| &function.backend)));
    let handle = Handle::Net(NetHandle { counters, switch, taps: opener.take_taps() });
    if vfs.is_empty() {
        return Ok((site.function(pf)?, handle));
    }
    let device = NetSriov::new(pf, vfs, placement, &host.memory);
    let mut device = device.map_err(|error| DeviceError::Sriov { option: site.option(), error })?;
    device.attach_iommu(|rid| {
        let is_behind = rid != placement.rid || plan.iommu;
        if is_behind { host.iommu_attachment(placement, rid) } else { None }
    });
    Ok((Box::new(device), handle))
}

/// The functions of a NIC that is opened.
struct Functions<'a> {
    site: &'a Site<'a>,
    net: &'a NetPlan,
    switch: Option<&'a Switch>,
    policy_watch: Arc<PolicyWatch>,
    failure_watch: Arc<FailureWatch>,
}

impl Functions<'_> {
    /// Opens VF `vf`, or the NIC's own function.
    fn open(&self, vf: Option<VfIndex>, of: &NicPlan, opener: &mut BackendOpener<'_>) -> Result<Net, DeviceError> {
        let Site { plan, host, .. } = *self.site;
        let id = self.net.id();
        let port = self.switch.filter(|_| matches!(of.backend, BackendPlan::Port(_)));
        let port = port.and_then(|switch| switch.port(vf.map_or(0, |index| switch::port_of(index.0))));
        let tap_of = TapOf { id: id.to_string(), vf: vf.map(|vf| vf.0), uplink: false };
        let behind_iommu = host.iommu.is_some() && (vf.is_some() || plan.iommu);
        let nic = nic(of, &function_option(plan, vf), NicSite { tap_of, port, behind_iommu }, opener)?;
        tell_backend(&nic, id, vf, &host.events);
        missing::tell_missing(&nic, id, vf, &host.events);
        self.policy_watch.observe(&nic, vf);
        self.failure_watch.observe(&nic, vf);
        Ok(nic)
    }
}

fn nic(plan: &NicPlan, option: &str, site: NicSite, opener: &mut BackendOpener<'_>) -> Result<Net, DeviceError> {
    let backend = opener.open(plan, option, site);
    let backend = backend.map_err(|error| DeviceError::Backend { option: option.to_string(), error })?;
    match Net::new(plan.spec.clone(), backend) {
        Err(error) if plan.missing == MissingBackend::LinkDown => {
            log::warn!("{option}: {error}; its link is down until it is given a backend (vm.set-vf)");
            Net::new(plan.spec.clone(), absent(plan, &error.to_string()))
        }
        net => net,
    }
    .map_err(|error| DeviceError::open(option, error.kind(), error))
}

/// The files of the backends of its functions, and of its switch's uplink.
pub(super) fn files(net: &NetPlan, option: &str) -> Vec<Rule> {
    let uplink = net.switch.as_ref().and_then(|switch| uplink_file(switch, option));
    distinct(uplink.into_iter().chain(net.functions().flat_map(|nic| of_nic(nic, option))))
}

/// The file of the uplink of `switch`, if it is opened here.
pub(super) fn uplink_file(switch: &SwitchPlan, option: &str) -> Option<Rule> {
    let is_opened = matches!(switch.uplink, Some(UplinkPlan::Tap(_)));
    is_opened.then(|| Rule::new(option, "/dev/net/tun", READ | WRITE))
}

/// The rules without duplicates: thousands of VFs use one /dev/net/tun.
fn distinct(rules: impl Iterator<Item = Rule>) -> Vec<Rule> {
    let mut seen = HashSet::new();
    rules.filter(|rule| seen.insert((rule.path.clone(), rule.access.bits(), rule.missing))).collect()
}

fn of_nic(nic: &NicPlan, option: &str) -> Vec<Rule> {
    let device = |path: &str| Rule::new(option, path, READ | WRITE);
    let of_kernel = |vhost| match vhost {
        Vhost::On => Some(device("/dev/vhost-net")),
        Vhost::Auto => Some(Rule { missing: Missing::Skip, ..device("/dev/vhost-net") }),
        Vhost::Off => None,
    };
    let rules = match &nic.backend {
        BackendPlan::Tap { vhost, .. } => [device("/dev/net/tun")].into_iter().chain(of_kernel(*vhost)).collect(),
        BackendPlan::Fds { vhost, .. } => of_kernel(*vhost).into_iter().collect(),
        BackendPlan::VhostUser { socket, mode: VhostMode::Server } => vec![Rule::of_socket(option, socket)],
        BackendPlan::VhostUser { mode: VhostMode::Client, .. } | BackendPlan::Port(_) => Vec::new(),
        BackendPlan::Vdpa(spec) => {
            let time_out = sysfs("char", &spec.path).and_then(|device| {
                let files = device.ancestors().map(|folder| folder.join("msg_timeout"));
                files.into_iter().find(|file| file.exists())
            });
            let time_out = time_out.map(|file| Rule { missing: Missing::Skip, ..Rule::new(option, file, READ) });
            [Rule::new(option, &spec.path, READ | WRITE)].into_iter().chain(time_out).collect()
        }
    };
    match nic.missing {
        MissingBackend::Refused => rules,
        MissingBackend::LinkDown => rules.into_iter().map(Rule::if_present).collect(),
        MissingBackend::LeftOut(_) => Vec::new(),
    }
}

/// The files of the switch's workers and uplink, and of all functions, enabled or not.
pub(super) fn open_files(net: &NetPlan) -> u64 {
    net.switch.as_ref().map_or(0, switch_files) + net.functions().map(files_of_function).sum::<u64>()
}

/// The number of files of the workers and the uplink of `switch`.
pub(super) fn switch_files(switch: &SwitchPlan) -> u64 {
    u64::from(switch.workers) * OF_SWITCH_WORKER + OF_UPLINK
}

/// Number of files of a function: one for each MSI-X vector (the queues', the control queue's, and that of
/// configuration changes), and the backend's. Of a tap passed by descriptor there is the passed one, and the NIC's
/// duplicate.
fn files_of_function(plan: &NicPlan) -> u64 {
    let pairs = u64::from(plan.spec.queue_pairs);
    let backend = match plan.backend {
        BackendPlan::Tap { vhost, .. } => pairs + of_worker(pairs, vhost),
        BackendPlan::Fds { vhost, .. } => 2 * pairs + of_worker(pairs, vhost),
        BackendPlan::Port(_) => OF_PORT,
        BackendPlan::VhostUser { .. } | BackendPlan::Vdpa { .. } => OF_SOCKET_OR_DEVICE + of_offloaded(pairs),
    };
    backend + 2 * pairs + 2
}

/// For each queue pair of a tap, its doorbell. The kernel's worker has two doorbells, a device, and a copy of the tap's
/// queue.
fn of_worker(pairs: u64, vhost: Vhost) -> u64 {
    if vhost == Vhost::Off { pairs } else { of_offloaded(pairs) + 2 * pairs }
}

/// For a backend that runs the queues itself: the doorbell of each queue, those of the worker and the control queue, a
/// stand-in for interrupts and one for errors.
const fn of_offloaded(pairs: u64) -> u64 {
    2 * pairs + 4
}

/// The switch's workers, and the threads of all functions.
pub(super) fn threads(net: &NetPlan) -> u64 {
    let of_switch = net.switch.as_ref().map_or(0, |switch| switch.workers.into());
    of_switch + net.functions().map(threads_of_function).sum::<u64>()
}

/// A thread for each queue pair whose frames this program carries. The kernel's workers for vhost-net count as threads
/// of this process too.
fn threads_of_function(plan: &NicPlan) -> u64 {
    let pairs = u64::from(plan.spec.queue_pairs);
    match plan.backend {
        BackendPlan::Tap { vhost, .. } | BackendPlan::Fds { vhost, .. } => {
            if vhost == Vhost::Off {
                pairs
            } else {
                pairs + 1
            }
        }
        // The switch's threads carry its frames.
        BackendPlan::Port(_) => 0,
        BackendPlan::VhostUser { .. } | BackendPlan::Vdpa { .. } => 1,
    }
}
