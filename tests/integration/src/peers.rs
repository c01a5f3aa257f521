//! Third-party programs that serve NICs over vhost-user, found in `PATH`: passt, and DPDK's testpmd.

pub(crate) mod storage;

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::host::tap::Subnet;
use crate::traffic::stream::Stream;

/// Time that a program may take to start serving. DPDK needs 5 s in the nested lab, and more under load.
const START_LIMIT: Duration = Duration::from_secs(60);
/// `__SO_ACCEPTCON`, as shown in /proc/net/unix.
const ACCEPTS: &str = "00010000";
/// The script with which udhcpc configures an address.
const DHCP_SCRIPT: &str = "/tmp/dhcp";

/// A program that serves guests. It is killed when this is dropped, or when the thread that started it ends.
pub(crate) struct Peer {
    child: Child,
    log: PathBuf,
}

impl Peer {
    /// Starts `command` with its output in the file `log`.
    pub(crate) fn start(mut command: Command, log: PathBuf) -> Peer {
        let sink = File::create(&log).unwrap_or_else(|error| panic!("{}: {error}", log.display()));
        let other = sink.try_clone().expect("a file can be shared");
        // SAFETY: the closure makes one system call without memory effects, which is sound between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let started = command.stdout(sink).stderr(other).spawn();
        let child = started.unwrap_or_else(|error| panic!("{}: {error}", command.get_program().to_string_lossy()));
        Peer { child, log }
    }

    /// ID of the program's process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `ready` returns true. At the time limit, panics with the program's log.
    pub(crate) fn wait_until(&mut self, ready: impl Fn() -> bool) {
        let deadline = Instant::now() + START_LIMIT;
        while !ready() {
            let ended = self.child.try_wait().expect("the program is our child");
            let log = || fs::read_to_string(&self.log).unwrap_or_default();
            assert!(ended.is_none() && Instant::now() < deadline, "the program does not serve ({ended:?}):\n{}", log());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A passt, which needs no privilege: it opens the guest's connections as its own. It serves one NIC.
pub struct Passt {
    peer: Peer,
    repair: Option<Peer>,
    socket: PathBuf,
    subnet: Subnet,
}

impl Passt {
    /// Starts a passt for a NIC at the guest's end of `subnet`, as the user `uid` or the current user. Its socket is in
    /// `folder`, which that user must be able to write to.
    pub fn start(folder: &Path, subnet: Subnet, uid: Option<u32>) -> Passt {
        let socket = folder.join(format!("passt{}.sock", subnet.0));
        // A killed passt leaves its socket, which would be mistaken for the new one.
        let _ = fs::remove_file(&socket);
        let mut command = Command::new("passt");
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        command.args(["--foreground", "--quiet", "--vhost-user", "--socket"]).arg(&socket).args(Passt::network(subnet));
        command.stdin(Stdio::null());
        let mut peer = Peer::start(command, socket.with_extension("log"));
        peer.wait_until(|| is_listening(&socket));
        Passt { peer, repair: None, socket, subnet }
    }

    /// The guest's network. It does not depend on the host's networks: only the host's loopback is behind it.
    fn network(subnet: Subnet) -> [String; 11] {
        let [guest, host] = [subnet.guest(), subnet.host()].map(|address| address.to_string());
        let words = ["--ipv4-only", "-a", &guest, "-n", "24", "-g", &host, "-i", "lo", "-o", "127.0.0.1"];
        words.map(str::to_owned)
    }

    /// Starts passt's helper, which moves its connections to or from another passt. It needs root.
    pub fn start_repair(&mut self) {
        let path = self.socket.with_extension("sock.repair");
        self.peer.wait_until(|| is_listening(&path));
        let mut command = Command::new("passt-repair");
        command.arg(&path).stdin(Stdio::null());
        self.repair = Some(Peer::start(command, path.with_extension("repair-log")));
    }

    /// True if passt has ended, as it does once its connections were moved to another.
    pub fn has_ended(&mut self) -> bool {
        self.peer.child.try_wait().expect("the program is our child").is_some()
    }

    /// Path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The part of `--net` or `--net-vf` that selects this backend.
    pub fn net(&self) -> String {
        format!("vhost_user=on,socket={}", self.socket.display())
    }

    /// The network between passt and the guest. Its host address leads to the host's loopback.
    pub fn subnet(&self) -> Subnet {
        self.subnet
    }

    /// Lets `interface` of the guest get its address by DHCP, and sends `len` checked bytes each way.
    pub fn join_and_transfer(&self, guest: &mut Guest, interface: &str, len: usize) {
        guest.join_by_dhcp(interface, self.subnet);
        self.transfer(guest, len);
    }

    /// Sends `len` checked bytes from the host to the guest and back.
    pub fn transfer(&self, guest: &mut Guest, len: usize) {
        guest.transfer_by(self.listener(), self.subnet, len);
    }

    /// Opens a connection from the guest to the host.
    pub fn open_stream(&self, guest: &mut Guest) -> Stream {
        Stream::open_by(self.listener(), guest, self.subnet)
    }

    /// A listener that the guest reaches at the host's address.
    fn listener(&self) -> TcpListener {
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the loopback has its address")
    }
}

/// True if a socket at `path` is listening, which is a moment after it exists. Connecting to find out is impossible: a
/// passt serves one client only.
pub(crate) fn is_listening(path: &Path) -> bool {
    // Address, references, protocol, flags, type, state, inode, path.
    let sockets = fs::read_to_string("/proc/net/unix").expect("Linux has Unix sockets");
    let is_it =
        |fields: &[&str]| fields.get(3) == Some(&ACCEPTS) && fields.get(7).is_some_and(|at| Path::new(at) == path);
    sockets.lines().any(|line| is_it(&line.split_whitespace().collect::<Vec<_>>()))
}

/// DPDK's testpmd, which forwards frames between the ports of each pair.
pub struct Testpmd {
    _peer: Peer,
    // testpmd ends when its input is closed.
    _input: ChildStdin,
}

impl Testpmd {
    /// Starts testpmd with `ports`, such as `net_vhost0,iface=/tmp/socket` and `net_tap0,iface=tap0`; each two in a row
    /// form a pair. Returns when the last port, with the network interface `last`, is up. It logs to `log`.
    pub fn start(ports: &[String], last: &str, log: PathBuf) -> Testpmd {
        let mut command = Command::new("dpdk-testpmd");
        command.args(["--no-huge", "-m", "256", "--no-pci", "--lcores", "0@0,1@0"]);
        for port in ports {
            command.args(["--vdev", port]);
        }
        // Otherwise it waits 9 s for guests to bring their links up.
        command.args(["--", "--total-num-mbufs=2048", "--disable-link-check", "--auto-start"]);
        command.stdin(Stdio::piped());
        let mut peer = Peer::start(command, log);
        let input = peer.child.stdin.take().expect("it was piped");
        // testpmd's output is buffered, so the carrier shows that it is ready.
        let carrier = Path::new("/sys/class/net").join(last).join("carrier");
        peer.wait_until(|| fs::read_to_string(&carrier).is_ok_and(|up| up.starts_with('1')));
        give_way(peer.child.id(), "dpdk-worker1");
        Testpmd { _peer: peer, _input: input }
    }
}

/// Gives a thread the lowest priority. A polling thread would otherwise take half of a single processor from the guest.
fn give_way(process: u32, thread: &str) {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("the process runs");
    let named =
        |task: &fs::DirEntry| fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == thread);
    let found = tasks.flatten().find(named).unwrap_or_else(|| panic!("the process has no thread {thread}"));
    let id: libc::id_t = found.file_name().to_string_lossy().parse().expect("a thread's folder is its id");
    // SAFETY: setpriority has no memory effects.
    assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, id, 19) }, 0, "lowering a thread's priority");
}

impl Guest {
    /// Brings `interface` up and configures it with DHCP; it must get the guest's address in `subnet`.
    pub fn join_by_dhcp(&mut self, interface: &str, subnet: Subnet) {
        let script = "#!/bin/sh\n[ $1 != bound ] || ip addr add $ip/$mask dev $interface\n".replace('\n', "\\n");
        self.ok(&format!("printf '{script}' > {DHCP_SCRIPT} && chmod +x {DHCP_SCRIPT}"));
        self.ok(&format!("ip addr flush dev {interface} && ip link set {interface} up"));
        self.ok(&format!("udhcpc -i {interface} -n -q -f -s {DHCP_SCRIPT}"));
        let addresses = self.ok(&format!("ip -o -4 addr show dev {interface}"));
        assert!(addresses.contains(&format!("{}/24", subnet.guest())), "{interface} has: {addresses}");
    }
}
