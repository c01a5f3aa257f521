//! A container in the guest, reduced to its network.

use integration::Guest;

/// A network namespace.
pub(crate) struct Container {
    name: &'static str,
    /// The host's address in the container's network.
    pub host: String,
}

impl Container {
    /// Creates a network namespace that lasts as long as the guest.
    pub(crate) fn new(guest: &mut Guest, name: &'static str, host: impl ToString) -> Container {
        let container = Container { name, host: host.to_string() };
        let file = container.file();
        guest.ok(&format!("unshare -n sleep 100000 > /dev/null 2>&1 & echo $! > {file}"));
        guest.wait_for(&format!("[ $(readlink /proc/$(cat {file})/ns/net) != $(readlink /proc/self/ns/net) ]"));
        container
    }

    /// Moves `interface` into the container as `eth0`, with `address`, which includes the prefix length.
    pub(crate) fn give(&self, guest: &mut Guest, interface: &str, address: &str) {
        guest.ok(&format!("ip link set {interface} netns $(cat {})", self.file()));
        for command in [
            &format!("ip link set {interface} name eth0"),
            &format!("ip addr add {address} dev eth0"),
            "ip link set eth0 up",
        ] {
            guest.ok(&self.inside(command));
        }
    }

    /// The command that runs `command` inside the container.
    pub(crate) fn inside(&self, command: &str) -> String {
        format!("nsenter -t $(cat {}) -n sh -c '{command}'", self.file())
    }

    /// The guest's file with the id of the process that keeps the namespace alive.
    fn file(&self) -> String {
        format!("/tmp/container-{}", self.name)
    }
}
