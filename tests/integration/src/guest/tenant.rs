//! Tenants of a guest: network namespaces with a VF each, so that packets between them leave the guest's kernel.

use std::time::Duration;

use crate::guest::Guest;
use crate::guest::sriov::{Pf, Vf};

/// A network namespace of the guest with one VF, called `vf`.
pub struct Tenant {
    index: usize,
}

impl Tenant {
    /// Enables `count` VFs, and gives each to a tenant.
    pub fn all(guest: &mut Guest, pf: &Pf, count: usize) -> Vec<Self> {
        pf.set_num_vfs(guest, count);
        pf.vfs(guest).iter().map(|vf| Self::with(guest, vf)).collect()
    }

    /// Moves the VF into its own namespace, and gives it the address 10.88.0.1 plus its index: without VLANs, all would
    /// be neighbours.
    pub fn with(guest: &mut Guest, vf: &Vf) -> Self {
        let tenant = Self { index: vf.index };
        let file = tenant.file();
        guest.ok(&format!("unshare -n sleep 100000 > /dev/null 2>&1 & echo $! > {file}"));
        guest.wait_for(&format!("[ $(readlink /proc/$(cat {file})/ns/net) != $(readlink /proc/self/ns/net) ]"));
        guest.ok(&format!("ip link set {} netns $(cat {file})", vf.interface()));
        tenant.inside(guest, &format!("ip link set {} name vf", vf.interface()));
        tenant.inside(guest, &format!("ip addr add {}/24 dev vf", tenant.address()));
        tenant.inside(guest, "ip link set vf up");
        tenant
    }

    fn file(&self) -> String {
        format!("/tmp/tenant{}", self.index)
    }

    /// The index of its VF.
    pub fn index(&self) -> usize {
        self.index
    }

    /// IP address.
    pub fn address(&self) -> String {
        format!("10.88.0.{}", self.index + 1)
    }

    /// The command line that runs a command without single quotes in the namespace.
    pub fn command(&self, command: &str) -> String {
        format!("nsenter -t $(cat {}) -n sh -c '{command}'", self.file())
    }

    fn inside(&self, guest: &mut Guest, command: &str) -> String {
        guest.ok(&self.command(command))
    }

    /// Runs a command without single quotes, within a time.
    pub fn ok_within(&self, guest: &mut Guest, command: &str, limit: Duration) -> String {
        guest.ok_within(&self.command(command), limit)
    }

    /// Waits for a connection at `port` in the background, and writes the received data to `file`.
    pub fn listen(&self, guest: &mut Guest, port: u16, file: &str) {
        guest.ok("[ -p /tmp/endless ] || mkfifo /tmp/endless");
        let listen = self.command(&format!("nc -l -p {port} 0<> /tmp/endless > {file}"));
        guest.ok(&format!("({listen}) 2> /dev/null &"));
        guest.wait_for(&self.command(&format!("grep -q :{port:04X} /proc/net/tcp /proc/net/tcp6")));
    }

    /// Number of packets whose IP, TCP or UDP checksum its kernel has found to be wrong. The kernel checks packets that
    /// its NIC does not declare as valid.
    pub fn wrong_checksums(&self, guest: &mut Guest) -> u64 {
        let tables = self.inside(guest, "cat /proc/net/snmp /proc/net/netstat");
        // Each line of names is followed by one of numbers.
        let lines: Vec<Vec<_>> = tables.lines().map(|line| line.split_whitespace().collect()).collect();
        let pairs = lines.chunks(2).filter_map(|pair| Some((pair.first()?, pair.get(1)?)));
        let found = pairs.flat_map(|(names, numbers)| names.iter().zip(numbers));
        let wrong: Vec<u64> = found
            .filter(|(name, _)| matches!(**name, "InCsumErrors" | "InHdrErrors"))
            .map(|(name, number)| number.parse().unwrap_or_else(|_| panic!("{name}: {number}")))
            .collect();
        assert!(wrong.len() >= 4, "IP, TCP, UDP and ICMP: {tables}");
        wrong.iter().sum()
    }

    /// True if a ping to `address` is answered.
    pub fn reaches(&self, guest: &mut Guest, address: &str) -> bool {
        guest.run(&self.command(&format!("ping -c 3 -i 0.3 -W 2 -I vf {address}"))).status == 0
    }

    /// Sends pings to `address` in the background, each as soon as the previous one was answered or lost, until the
    /// namespace or its VF is removed.
    pub fn flood(&self, guest: &mut Guest, address: &str) {
        let ping = format!("while ping -A -q -c 1000 -s 1000 -W 1 -I vf {address}; do :; done");
        guest.ok(&format!("({}) > /dev/null 2>&1 &", self.command(&ping)));
    }

    /// Gives the VF another address. Returns true if the VF accepted it.
    pub fn change_address(&self, guest: &mut Guest, mac: &str) -> bool {
        let change = self.command(&format!("ip link set vf down; ip link set vf address {mac}"));
        let taken = guest.run(&change).status == 0;
        self.inside(guest, "ip link set vf up");
        taken
    }

    /// Ends the namespace. Its VF returns to the guest's first one.
    pub fn end(self, guest: &mut Guest) {
        guest.ok(&format!("kill $(cat {})", self.file()));
    }
}

/// Reachability between tenants: a row for each, of `+` and `-`, and `.` for itself.
pub fn reachability(guest: &mut Guest, tenants: &[Tenant]) -> Vec<String> {
    let mut row = |from: &Tenant| {
        let mut cell = |to: &Tenant| match from.index == to.index {
            true => '.',
            false if from.reaches(guest, &to.address()) => '+',
            false => '-',
        };
        tenants.iter().map(&mut cell).collect()
    };
    tenants.iter().map(&mut row).collect()
}
