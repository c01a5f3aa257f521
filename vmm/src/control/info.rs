//! Replies to `vm.info` and `vm.counters`.

use std::collections::BTreeMap;

use pci::{Bdf, MemoryKind, VfIndex, Window, WindowId};
use virtio_devices::{HostNic, Status, Switch, VirtioPci};

use crate::api::Link;
use crate::api::info::{
    BackendInfo, BackendKind, BarType, DeviceNode, NicInfo, PciBar, PolicyInfo, Resource, SriovInfo, StoppedBy,
    SwitchInfo, VfInfo, VfState, VmCounters, VmInfo,
};
use crate::config::{BackendPlan, DeviceKind, MacAddress, NetPlan, NicPlan, SwitchMode};
use crate::control::instance::Instance;
use crate::devices::{Counted, Plugged};
use crate::vm::Vm;

/// Name of the serial port in `vm.counters`.
const SERIAL: &str = "__serial";

/// Reply to `vm.info`.
pub(super) fn info(instance: &Instance) -> VmInfo {
    let mut config = instance.config().clone();
    config.cpus.boot_vcpus = instance.vcpus();
    let [serial, console, debug] = instance.vm().map(Vm::ptys).unwrap_or_default();
    let files = [&mut config.serial.file, &mut config.console.file, &mut config.debug_console.file];
    for (file, pty) in files.into_iter().zip([serial, console, debug]) {
        if let Some(pty) = pty {
            *file = Some(pty.to_path_buf());
        }
    }
    let devices = || instance.vm().into_iter().flat_map(|vm| vm.devices().iter());
    VmInfo {
        state: instance.state(),
        memory_actual_size: actual_memory(instance),
        device_tree: devices().flat_map(nodes).map(|node| (node.id.clone(), node)).collect(),
        nics: devices().filter_map(|plugged| nic(instance, plugged)).collect(),
        sriov: devices().filter_map(|plugged| sriov(instance, plugged)).collect(),
        config,
    }
}

/// Size of guest memory, in bytes; before boot, the configured size.
fn actual_memory(instance: &Instance) -> u64 {
    let memory = &instance.config().memory;
    // The driver may report any size.
    instance.vm().map_or(memory.wanted(), |vm| {
        memory.total().saturating_add(vm.plugged_memory()).saturating_sub(vm.balloon().actual())
    })
}

/// Reply to `vm.counters`.
pub(super) fn counters(instance: &Instance) -> VmCounters {
    let devices = instance.vm().into_iter().flat_map(|vm| vm.devices().iter());
    // No device can have this name, nor the uplink's.
    let serial = instance.vm().and_then(Vm::serial).map(|serial| (SERIAL.to_string(), named(serial.counters())));
    devices.flat_map(functions).chain(serial).collect()
}

/// Counters with owned names.
fn named<'a>(counters: impl IntoIterator<Item = (&'a str, u64)>) -> BTreeMap<String, u64> {
    counters.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// Counters of each function of a device, by id; the device's own function first.
fn functions(plugged: &Plugged) -> Vec<(String, BTreeMap<String, u64>)> {
    let Counted { kind: _, mut functions, latencies } = plugged.counted();
    functions.first_mut().into_iter().for_each(|own| own.extend(&latencies));
    let counted = functions.into_iter().map(named);
    // `check_id` reserves this name.
    let uplink = plugged.switch().and_then(Switch::uplink_counters);
    let uplink = uplink.map(|uplink| (format!("__uplink_{}", plugged.plan().id), named(uplink.iter())));
    plugged.plan().names().into_iter().zip(counted).chain(uplink).collect()
}

/// Node of the device; for a virtio device also that of its PCI function.
fn nodes(plugged: &Plugged) -> Vec<DeviceNode> {
    let id = plugged.plan().id.clone();
    let function = DeviceNode {
        pci_bdf: Some(plugged.address().to_string()),
        resources: resources(plugged),
        ..DeviceNode::default()
    };
    if plugged.plan().kind == DeviceKind::Pvpanic {
        return vec![DeviceNode { id, ..function }];
    }
    let carrier = format!("_virtio-pci-{id}");
    vec![
        DeviceNode { id: id.clone(), parent: Some(carrier.clone()), ..DeviceNode::default() },
        DeviceNode { id: carrier, children: vec![id], ..function },
    ]
}

/// BARs of the device's own function with decoding enabled.
fn resources(plugged: &Plugged) -> Vec<Resource> {
    let windows = plugged.slot().windows();
    let bars = windows.into_iter().filter_map(|window| match window.id {
        WindowId::Bar(bar) => Some((bar.get(), window)),
        WindowId::VfBar(_) => None,
    });
    bars.map(|(index, Window { base, len: size, kind, .. })| {
        let (type_, prefetchable) = match kind {
            MemoryKind::Memory32 => (BarType::Mmio32, false),
            MemoryKind::Memory64 { prefetchable } => (BarType::Mmio64, prefetchable),
        };
        Resource::PciBar(PciBar { index, base, size, type_, prefetchable })
    })
    .collect()
}

/// Information on a NIC without VFs; `None` for other devices and for PFs.
fn nic(instance: &Instance, plugged: &Plugged) -> Option<NicInfo> {
    let plan = plugged.plan().net()?;
    let placement = plugged.placement();
    if placement.vfs.is_some() {
        return None;
    }
    plugged.slot().with(|device| {
        let (needs_reset, stopped_by) = (needs_reset(device, None), stopped_by(device, None));
        let port = device.host_nic(None)?;
        Some(NicInfo {
            id: plan.id().to_string(),
            bdf: plugged.address().to_string(),
            mac: MacAddress(port.mac()),
            backend: backend(plugged, (None, Some(&plan.pf)), port),
            link: link(port),
            needs_reset,
            stopped_by,
            policy: instance.policy(plan.id(), None),
        })
    })?
}

/// True if a function needs a reset by its driver.
fn needs_reset(device: &dyn VirtioPci, vf: Option<VfIndex>) -> bool {
    device.function_status(vf).is_some_and(|status| status.driver.contains(Status::DEVICE_NEEDS_RESET))
}

/// The register that keeps the queues of a function's ready driver stopped, if one does.
fn stopped_by(device: &dyn VirtioPci, vf: Option<VfIndex>) -> Option<StoppedBy> {
    device.function_status(vf)?.stopped_by.map(|register| match register {
        virtio_devices::StoppedBy::BusMaster => StoppedBy::BusMaster,
        virtio_devices::StoppedBy::D3hot => StoppedBy::D3hot,
        virtio_devices::StoppedBy::PfD3hot => StoppedBy::PfD3hot,
    })
}

fn link(port: &dyn HostNic) -> Link {
    if port.link_up() { Link::Up } else { Link::Down }
}

fn sriov(instance: &Instance, plugged: &Plugged) -> Option<SriovInfo> {
    // An X550's functions are ports of its switch: they have no plans of their own.
    let plan = plugged.plan().net();
    let id = plan.map(NetPlan::id).or_else(|| plugged.plan().x550().map(|x550| x550.id.as_str()))?;
    let placement = plugged.placement();
    let vfs = placement.vfs?;
    let pf = plan.map(|plan| &plan.pf);
    let (status, mac, (backend, link), (needs_reset, stopped_by)) = plugged.slot().with(|device| {
        let status = device.sriov_status()?;
        let state = (needs_reset(device, None), stopped_by(device, None));
        let port = device.host_nic(None)?;
        Some((status, MacAddress(port.mac()), (backend(plugged, (None, pf), port), link(port)), state))
    })??;
    let vf = |index: VfIndex| {
        let policy = instance.policy(id, Some(index.0));
        let nic = plan.and_then(|plan| plan.vfs.get(usize::from(index.0)));
        vf(plugged, index, placement.bdf(vfs.vf_rid(placement.rid, index)), (nic, policy))
    };
    Some(SriovInfo {
        id: id.to_string(),
        bdf: plugged.address().to_string(),
        mac,
        backend,
        link,
        needs_reset,
        stopped_by,
        policy: instance.policy(id, None),
        switch: plugged.switch().map(switch),
        total_vfs: vfs.total_vfs,
        num_vfs: status.num_vfs,
        enabled: status.vf_enable,
        vfs: (0..vfs.total_vfs).map(VfIndex).filter_map(vf).collect(),
    })
}

fn switch(switch: &Switch) -> SwitchInfo {
    let uplink_lost = switch.uplink_gone();
    SwitchInfo {
        mode: match switch.mode() {
            virtio_devices::SwitchMode::Veb => SwitchMode::Veb,
            virtio_devices::SwitchMode::Vepa => SwitchMode::Vepa,
        },
        uplink: switch.uplink_name().map(str::to_string),
        uplink_lost,
        uplink_down: !uplink_lost && switch.uplink_up() == Some(false),
        uplink_passed: switch.uplink_was_passed(),
        workers: switch.workers(),
        uplink_rate: switch.uplink_rate(),
    }
}

fn vf(plugged: &Plugged, index: VfIndex, address: Bdf, of: (Option<&NicPlan>, PolicyInfo)) -> Option<VfInfo> {
    let (plan, policy) = of;
    plugged.slot().with(|device| {
        let status = device.function_status(Some(index))?;
        let stopped_by = stopped_by(device, Some(index)).filter(|_| status.exists);
        let port = device.host_nic(Some(index))?;
        Some(VfInfo {
            index: index.0,
            bdf: address.to_string(),
            mac: MacAddress(port.mac()),
            backend: backend(plugged, (Some(index), plan), port),
            link: link(port),
            state: match status.driver {
                _ if status.removed => VfState::Removed,
                _ if !status.exists => VfState::Reserved,
                driver if driver.contains(Status::DRIVER_OK) => VfState::Running,
                _ => VfState::Enabled,
            },
            needs_reset: status.exists && status.driver.contains(Status::DEVICE_NEEDS_RESET),
            stopped_by,
            policy,
        })
    })?
}

fn backend(plugged: &Plugged, (vf, plan): (Option<VfIndex>, Option<&NicPlan>), port: &dyn HostNic) -> BackendInfo {
    let was_passed = plan.is_some_and(|plan| matches!(plan.backend, BackendPlan::Fds { .. }));
    let kind = match port.backend_kind() {
        virtio_devices::BackendKind::Tap if was_passed => BackendKind::Fd,
        virtio_devices::BackendKind::Tap => BackendKind::Tap,
        virtio_devices::BackendKind::VhostNet => BackendKind::VhostNet,
        virtio_devices::BackendKind::VhostUser => BackendKind::VhostUser,
        virtio_devices::BackendKind::Vdpa => BackendKind::Vdpa,
        virtio_devices::BackendKind::Switch => BackendKind::Switch,
        virtio_devices::BackendKind::Absent => BackendKind::Missing,
    };
    let error = port.backend_missing().map(str::to_string);
    let name = (!was_passed && error.is_none()).then(|| port.backend_name().to_string());
    let (made, lost, down) = (plugged.tap_was_made(vf), port.backend_lost(), port.tap_down());
    BackendInfo { kind, name, made, lost, down, error }
}
