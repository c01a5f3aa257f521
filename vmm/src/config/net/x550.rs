//! The rules for an emulated Intel X550 or X540, and its plan.
//!
//! The guest owns such a NIC: it sets the policies of the PF and of the VFs, which are ports of a switch. The host owns
//! the uplink of that switch.

use virtio_devices::{UplinkPolicy, X550_VFS, X550Model};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::id::vf_id;
use vm_api::config::kinds::Ids;
use vm_api::config::mac::{MacAddress, MacChoice};
use vm_api::config::net::NetConfig;
use vm_api::config::net::backend::BackendConfig;
use vm_api::config::net::model::NicModel;
use vm_api::config::net::policy::LinkPolicy;
use vm_api::config::net::switch::SwitchMode;
use vm_api::config::net::vhost::VhostMode;
use vm_api::config::rate::{BANDWIDTH, OPS};

use crate::config::net::nic::Nic;
use crate::config::net::switch::{self, SwitchPlan};
use crate::config::net::{policy, uplink_rate};
use crate::config::rate;
use crate::config::subject::Subject;
use crate::pci_layout::RootBus;

/// An Intel X550 with its VFs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct X550Plan {
    /// Name, unique in the VM.
    pub id: String,
    /// The product that the guest sees.
    pub model: X550Model,
    /// Permanent MAC address of the PF. The guest sets those of the VFs.
    pub mac: MacAddress,
    /// Number of VFs that it reserves, up to 63.
    pub total_vfs: u16,
    /// The switch that connects its functions, in the mode before a driver sets one, with the host's uplink.
    pub switch: SwitchPlan,
    /// Rules of the host for what its functions exchange with the uplink.
    pub uplink_policy: UplinkPolicy,
    /// True if its link is up when it is plugged in.
    pub link_up: bool,
    /// True if its link is down while its uplink is.
    pub follows_uplink: bool,
    /// The further root bus of segment 0 that it is on, if it is on one.
    pub root: Option<RootBus>,
}

impl X550Plan {
    /// The NIC of this model that `config` describes, which was checked.
    pub(crate) fn new(model: X550Model, config: &NetConfig, id: String, mac: MacAddress) -> Self {
        Self {
            id,
            model,
            mac,
            total_vfs: config.sriov_vfs,
            switch: SwitchPlan::new(config, SwitchMode::Veb),
            uplink_policy: policy::uplink_policy_of(config),
            link_up: policy::link_up(config),
            follows_uplink: config.policy.link.unwrap_or_default() == LinkPolicy::Auto,
            root: None,
        }
    }

    /// The names of its functions: its own, then those of its VFs by index.
    pub fn names(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.id.clone()).chain((0..self.total_vfs).map(|index| vf_id(&self.id, index)))
    }
}

/// Checks the VFs of each X550 among `nets`. Settings for ranges of VFs need not have been expanded.
///
/// # Errors
///
/// Fails if one reserves more VFs than it can have, or gives a VF settings.
pub(crate) fn check_vfs(nets: &[NetConfig], ids: &Ids) -> Result<(), ConfigError> {
    for ((index, net), id) in nets.iter().enumerate().zip(ids.of::<NetConfig>()) {
        let Some(model) = model(net) else { continue };
        if net.sriov_vfs > X550_VFS {
            let subject = Subject::device("--net", net.id.as_deref(), index, nets.len());
            let what = format!("an {model} has at most {X550_VFS} VFs; reserve fewer");
            return Err(ConfigError::new(subject.key("sriov_vfs", net.sriov_vfs), Problem::Limit(what)));
        }
        if let Some(vf) = net.vfs.first() {
            let what = format!(
                "the guest owns the VFs of an {model} and configures them (ip link set <PF> vf); leave this out, or \
                 give the NIC model=virtio"
            );
            return Err(ConfigError::new(Subject::vf(&id, vf.index).bare(), Problem::Conflict(what)));
        }
    }
    Ok(())
}

/// The product, unless the NIC is a virtio NIC.
pub(crate) const fn model(config: &NetConfig) -> Option<X550Model> {
    match config.model {
        NicModel::Virtio => None,
        NicModel::X550 => Some(X550Model::X550),
        NicModel::X540 => Some(X550Model::X540),
    }
}

/// Checks a NIC of this model in a VM of `vcpus` vCPUs.
///
/// # Errors
///
/// Fails with a key that the guest decides or that no X550 can have, and with a wrong uplink.
pub(crate) fn check(model: X550Model, config: &NetConfig, vcpus: u32, subject: &Subject) -> Result<(), ConfigError> {
    let refuse = |key: &str, value: String, what: String| {
        Err(ConfigError::new(subject.key(key, value), Problem::Conflict(what)))
    };
    let given = of_driver(model, config);
    let given = given.or_else(|| of_backend(model, &config.backend)).or_else(|| of_policy(model, config));
    if let Some((key, value, what)) = given {
        return refuse(key, value, what);
    }
    if let Some(limits) = &config.rate_limiter_config {
        let limits = rate::plan(limits, subject)?;
        let limit = limits.bandwidth.map(|limit| (BANDWIDTH.size, limit.size));
        if let Some((key, size)) = limit.or_else(|| limits.ops.map(|limit| (OPS.size, limit.size))) {
            let what = format!("an {model} has a limit of its uplink alone; give uplink_rate= instead of {key}");
            return refuse(key, size.to_string(), what);
        }
    }
    // The rules for a PF's switch and its uplink, which is the PF's backend.
    let uplink = NetConfig { switch: Some(SwitchMode::Veb), sriov_vfs: config.sriov_vfs.max(1), ..config.clone() };
    uplink_rate::check_uplink(&uplink, subject)?;
    switch::check_closed(&uplink, subject)?;
    let of_uplink = policy::policy_of(config, None);
    if let (false, Some(key)) = (config.backend.is_given(), of_uplink.restrictions().next()) {
        let what = format!("a rule for the uplink of an X550, which has none; add tap=, or leave {key} out");
        return refuse(key, config.policy.value_of(key).unwrap_or_default(), what);
    }
    switch::check_workers(&uplink, vcpus, subject)?;
    Nic { subject, config: &uplink }.check(vcpus)
}

/// A key that is given, its value, and the reason for its refusal with a remedy.
type Refused = (&'static str, String, String);

/// A given key of the device that the guest's driver decides, or that no X550 has.
fn of_driver(model: X550Model, config: &NetConfig) -> Option<Refused> {
    let usual = NetConfig::default();
    let NetConfig { mac, mtu, num_queues, queue_size, offload_tso, offload_ufo, offload_csum, standby, switch, .. } =
        config;
    let chosen = |what: &str, key: &str| {
        format!("the guest's driver chooses the {what} of an {model}; leave {key} out, or give model=virtio")
    };
    let number = |value: u16, usual: u16| (value != usual).then(|| value.to_string());
    let off = |is_on: bool| (!is_on).then(|| "off".to_string());
    let name = |mode: SwitchMode| if mode == SwitchMode::Veb { "veb" } else { "vepa" };
    let given = [
        (
            "mac",
            (*mac == Some(MacChoice::Any)).then(|| "any".to_string()),
            format!("an {model} has one permanent address; give that, or leave mac out to have one chosen"),
        ),
        (
            "mtu",
            mtu.map(|mtu| mtu.to_string()),
            format!(
                "the guest's driver sets the MTU of an {model}; leave mtu out, and set that of the uplink on the host"
            ),
        ),
        ("num_queues", number(*num_queues, usual.num_queues), chosen("queues", "num_queues")),
        ("queue_size", number(*queue_size, usual.queue_size), chosen("queue sizes", "queue_size")),
        ("offload_tso", off(*offload_tso), chosen("offloads", "offload_tso")),
        ("offload_ufo", off(*offload_ufo), chosen("offloads", "offload_ufo")),
        ("offload_csum", off(*offload_csum), chosen("offloads", "offload_csum")),
        (
            "standby",
            standby.then(|| "on".to_string()),
            "only a virtio NIC can be a standby; leave standby out, or give model=virtio".to_string(),
        ),
        (
            "switch",
            switch.map(|value| name(value).to_string()),
            format!(
                "an {model} always has a switch, and the guest's driver sets its mode (bridge link set dev <PF> \
                 hwmode); leave switch out"
            ),
        ),
    ];
    given.into_iter().find_map(|(key, value, what)| Some((key, value?, what)))
}

/// A given key of a backend that cannot be the uplink.
fn of_backend(model: X550Model, backend: &BackendConfig) -> Option<Refused> {
    let BackendConfig { vhost, vhost_user, vhost_socket, vhost_mode, vdpa, .. } = backend;
    let given = [
        ("vhost", vhost.filter(|vhost| !vhost.is_off()).map(|vhost| vhost.name().to_string())),
        ("vhost_user", vhost_user.then(|| "on".to_string())),
        ("socket", vhost_socket.as_ref().map(|path| path.display().to_string())),
        ("vhost_mode", (*vhost_mode == VhostMode::Server).then(|| "server".to_string())),
        ("vdpa", vdpa.as_ref().map(|path| path.display().to_string())),
    ];
    let (key, value) = given.into_iter().find_map(|(key, value)| Some((key, value?)))?;
    let what = format!(
        "the uplink of an {model} is a tap whose packets this program carries; leave {key} out, or give model=virtio"
    );
    Some((key, value, what))
}

/// Keys of the policy that the host has for an X550: its link, and rules for all frames at its uplink.
const OF_HOST: [&str; 6] = ["link", "vlan", "vlan_qos", "vlan_proto", "trunk", "storm"];

/// A given key of the policy that is not the host's. The guest's driver sets the policy of each function.
fn of_policy(model: X550Model, config: &NetConfig) -> Option<Refused> {
    let (key, value) = config.policy.given().find(|(key, _)| !OF_HOST.contains(key))?;
    let remedy = match key {
        "max_tx_rate" | "min_tx_rate" => format!("give uplink_rate= instead of {key}"),
        _ => format!("leave {key} out, and restrict the uplink's port on the host"),
    };
    let what =
        format!("the guest owns the functions of an {model} and sets their policies; {remedy} (docs/guide/x550.md)");
    Some((key, value, what))
}
