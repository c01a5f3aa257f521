//! A PF whose VFs have backends of different kinds.

use std::thread;
use std::time::{Duration, Instant};

use fixtures::process::Process;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::guest::sriov::{Pf, vf_mac};
use crate::guest::{Guest, GuestSpec};
use crate::host::tap::HostTap;
use crate::lab::Kernel;
use crate::vmm::api::Api;

/// Time that the VMM may take to notice that a backend was lost or returned.
const NOTICE: Duration = Duration::from_secs(60);

/// The kind of a VF's backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// A tap; the VMM carries the frames.
    Tap,
    /// A tap; the host's kernel carries the frames.
    VhostNet,
    /// The vhost-user fixture, over a socket.
    VhostUser,
    /// The VDUSE fixture, as a vDPA device.
    Vdpa,
}

/// The processes and taps behind a PF's VFs. Whatever the kind of backend, its host side is a tap.
pub struct Backends {
    /// Prefix of the names of taps and of vDPA devices; the VF's index follows.
    prefix: String,
    kinds: Vec<Backend>,
    sockets: TempDir,
    vhost_user: Option<Process>,
    vduse: Option<Process>,
    persistent: Vec<HostTap>,
}

impl Backends {
    /// Starts the processes that the VFs' backends need: `kinds[i]` is the kind of VF i. `vhost_user` and `vduse` are
    /// options of the fixtures.
    pub fn start_with(kinds: &[Backend], vhost_user: &[&str], vduse: &[&str]) -> Backends {
        let by_fixtures = |kind: Backend| matches!(kind, Backend::VhostUser | Backend::Vdpa);
        Backends::prepare("pf0v", kinds, by_fixtures, vhost_user, vduse)
    }

    /// As [`Backends::start`]. All taps exist before the VMM starts, and stay when it ends; their names are `prefix`
    /// and the VF's index.
    pub fn start_persistent(prefix: &str, kinds: &[Backend]) -> Backends {
        Backends::prepare(prefix, kinds, |_| true, &[], &[])
    }

    fn prepare(
        prefix: &str,
        kinds: &[Backend],
        is_persistent: impl Fn(Backend) -> bool,
        vhost_user: &[&str],
        vduse: &[&str],
    ) -> Backends {
        let sockets = tempfile::tempdir().expect("a folder for sockets");
        let (prefix, kinds) = (prefix.to_owned(), kinds.to_vec());
        let mut backends = Backends { prefix, kinds, sockets, vhost_user: None, vduse: None, persistent: Vec::new() };
        for (index, _) in backends.kinds.iter().enumerate().filter(|(_, kind)| is_persistent(**kind)) {
            backends.persistent.push(HostTap::persistent(&backends.tap_name(index)));
        }
        let kinds = backends.kinds.clone();
        if kinds.contains(&Backend::VhostUser) {
            backends.start_vhost_user(vhost_user);
        }
        if kinds.contains(&Backend::Vdpa) {
            backends.start_vduse(vduse);
        }
        backends
    }

    /// As [`Backends::start_with`], with all features of the fixtures on.
    pub fn start(kinds: &[Backend]) -> Backends {
        Backends::start_with(kinds, &[], &[])
    }

    /// Starts or restarts the vhost-user fixture.
    pub fn start_vhost_user(&mut self, options: &[&str]) {
        let sockets = self.of(Backend::VhostUser).map(|index| {
            format!("socket={},name=vf{index},tap={},mac={}", self.socket(index), self.tap_name(index), vf_mac(index))
        });
        let arguments: Vec<String> = options.iter().map(|option| (*option).to_owned()).chain(sockets).collect();
        self.vhost_user = Some(Process::vhost_user_net(&arguments.iter().map(String::as_str).collect::<Vec<_>>()));
    }

    fn start_vduse(&mut self, options: &[&str]) {
        let device =
            |index| format!("name={},tap={},mac={}", self.vdpa_name(index), self.tap_name(index), vf_mac(index));
        let devices = self.of(Backend::Vdpa).map(device);
        let arguments: Vec<String> = options.iter().map(|option| (*option).to_owned()).chain(devices).collect();
        self.vduse = Some(Process::vduse_net(&arguments.iter().map(String::as_str).collect::<Vec<_>>()));
    }

    fn tap_name(&self, index: usize) -> String {
        format!("{}{index}", self.prefix)
    }

    fn vdpa_name(&self, index: usize) -> String {
        format!("vf{}", self.tap_name(index).trim_start_matches("pf0v"))
    }

    fn of(&self, wanted: Backend) -> impl Iterator<Item = usize> {
        self.kinds.iter().enumerate().filter(move |(_, kind)| **kind == wanted).map(|(index, _)| index)
    }

    fn socket(&self, index: usize) -> String {
        self.sockets.path().join(format!("vf{index}.sock")).display().to_string()
    }

    /// The value of `--net-vf` for VF `index`.
    pub fn vf(&self, index: usize) -> String {
        let backend = match self.kinds[index] {
            Backend::Tap => format!("tap={}", self.tap_name(index)),
            Backend::VhostNet => format!("tap={},vhost=on", self.tap_name(index)),
            Backend::VhostUser => format!("vhost_user=on,socket={}", self.socket(index)),
            Backend::Vdpa => format!("vdpa={}", self.node(index).display()),
        };
        format!("pf=pf0,index={index},mac={},{backend}", vf_mac(index))
    }

    /// The vDPA device of VF `index`.
    pub fn node(&self, index: usize) -> std::path::PathBuf {
        self.vduse.as_ref().expect("there is no vDPA device").node(&self.vdpa_name(index))
    }

    /// VF `index` over these backends, as an entry of `backends` in a restore or a migration's target.
    pub fn given(&self, index: usize) -> Value {
        match self.kinds[index] {
            Backend::Tap | Backend::VhostNet => json!({"id": "pf0", "vf": index, "tap": self.tap_name(index)}),
            Backend::VhostUser => json!({"id": "pf0", "vf": index, "vhost_socket": self.socket(index)}),
            Backend::Vdpa => json!({"id": "pf0", "vf": index, "vdpa": self.node(index)}),
        }
    }

    /// A guest with a PF `pf0` over the tap `pf0`, and VFs over these backends.
    pub fn spec(&self, kernel: Kernel) -> GuestSpec {
        self.spec_over("pf0", kernel)
    }

    /// As [`Backends::spec`], with the PF over `tap`.
    pub fn spec_over(&self, tap: &str, kernel: Kernel) -> GuestSpec {
        self.spec_with(&format!("tap={tap}"), kernel)
    }

    /// As [`Backends::spec`], with the tap and further keys of the PF in `keys`.
    pub fn spec_with(&self, keys: &str, kernel: Kernel) -> GuestSpec {
        let vfs = self.kinds.len();
        let spec = GuestSpec::new(kernel).net(&format!("id=pf0,mac=52:54:00:00:00:01,sriov_vfs={vfs},{keys}"));
        (0..vfs).fold(spec, |spec, index| spec.net_vf(&self.vf(index)))
    }

    /// The taps behind the VFs, while the guest runs.
    pub fn taps(&self) -> Vec<HostTap> {
        (0..self.kinds.len()).map(|index| HostTap::existing(&self.tap_name(index))).collect()
    }

    /// The process that serves the vhost-user sockets.
    pub fn vhost_user(&mut self) -> &mut Process {
        self.vhost_user.as_mut().expect("there is no vhost-user socket")
    }

    /// The process that serves the vDPA devices.
    pub fn vduse(&mut self) -> &mut Process {
        self.vduse.as_mut().expect("there is no vDPA device")
    }

    /// Kills the process that serves the vhost-user sockets.
    pub fn kill_vhost_user(&mut self) {
        self.vhost_user.take().expect("there is no vhost-user socket").kill();
    }

    /// Kills the process that serves the vDPA devices.
    pub fn kill_vduse(&mut self) {
        self.vduse.take().expect("there is no vDPA device").kill();
    }
}

impl Api {
    /// The entry of VF `index` of the first PF in `vm.info`.
    pub fn vf(&self, index: usize) -> Value {
        self.info()["sriov"][0]["vfs"][index].clone()
    }

    /// Waits until `vm.info` reports the backend of VF `index` as lost, or as present.
    pub fn await_lost(&self, index: usize, lost: bool) {
        let deadline = Instant::now() + NOTICE;
        loop {
            let vf = self.vf(index);
            if vf["backend"]["lost"].as_bool().unwrap_or(false) == lost {
                return;
            }
            assert!(Instant::now() < deadline, "VF {index} never had lost={lost}: {vf}");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Guest {
    /// Waits until the link of `interface` is up, or down.
    pub fn await_carrier(&mut self, interface: &str, up: bool) {
        self.wait_for(&format!("[ $(cat /sys/class/net/{interface}/carrier) = {} ]", u8::from(up)));
    }

    /// Resets the function at `address` with its driver unbound, and binds the driver again.
    pub fn reset_function(&mut self, address: &str) {
        self.unbind(address);
        self.ok(&format!("echo 1 > /sys/bus/pci/devices/{address}/reset"));
        self.bind(address);
    }
}

impl Pf {
    /// Waits until all `count` VFs have a netdev.
    pub fn await_netdevs(&self, guest: &mut Guest, count: usize) {
        guest.wait_for(&format!("[ $(ls -d {} | wc -l) = {count} ]", self.file("virtfn*/virtio*/net/*")));
    }
}
