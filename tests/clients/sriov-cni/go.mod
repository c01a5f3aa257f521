module vmm.invalid/sriov-cni

go 1.24.0

tool github.com/intel/sriov-cni/cmd/sriov

require (
	github.com/containernetworking/cni v0.6.0 // indirect
	github.com/containernetworking/plugins v0.7.5 // indirect
	github.com/coreos/go-iptables v0.4.5 // indirect
	github.com/intel/sriov-cni v2.1.0+incompatible // indirect
	github.com/onsi/ginkgo v1.16.5 // indirect
	github.com/onsi/gomega v1.19.0 // indirect
	github.com/stretchr/testify v1.8.4 // indirect
	github.com/vishvananda/netlink v0.0.0-20181108222139-023a6dafdcdf // indirect
	github.com/vishvananda/netns v0.0.0-20180720170159-13995c7128cc // indirect
	golang.org/x/sys v0.32.0 // indirect
)

// The project is called so in its own sources at this version, and is at another place now.
replace github.com/intel/sriov-cni => github.com/k8snetworkplumbingwg/sriov-cni v2.1.0+incompatible
