//! A container of the guest, as far as its network goes.

use integration::Guest;

/// A network namespace.
pub struct Container {
    name: &'static str,
    /// The host's address as the container sees it.
    pub host: String,
}

impl Container {
    /// Makes a network namespace that lasts as long as the guest.
    pub fn new(guest: &mut Guest, name: &'static str, host: impl ToString) -> Container {
        let container = Container { name, host: host.to_string() };
        let file = container.file();
        guest.ok(&format!("unshare -n sleep 100000 > /dev/null 2>&1 & echo $! > {file}"));
        guest.wait_for(&format!("[ $(readlink /proc/$(cat {file})/ns/net) != $(readlink /proc/self/ns/net) ]"));
        container
    }

    /// Gives it `interface`, as `eth0` with an address and its length of prefix.
    pub fn give(&self, guest: &mut Guest, interface: &str, address: &str) {
        guest.ok(&format!("ip link set {interface} netns $(cat {})", self.file()));
        for command in [
            &format!("ip link set {interface} name eth0"),
            &format!("ip addr add {address} dev eth0"),
            "ip link set eth0 up",
        ] {
            guest.ok(&self.inside(command));
        }
    }

    /// A command in it.
    pub fn inside(&self, command: &str) -> String {
        format!("nsenter -t $(cat {}) -n sh -c '{command}'", self.file())
    }

    /// Where the guest keeps the process that is alone in it.
    fn file(&self) -> String {
        format!("/tmp/container-{}", self.name)
    }
}
