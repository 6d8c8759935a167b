// Package packages tests the packages of make packages with the tools of
// distributions: installed into a clean root, used there, upgraded, and removed.
//
//	make test-packages                         the short form
//	make test-packages-full                    with what takes long
//	RNBD_PACKAGES=1 go test -run Install -v .  a part of it
//	make test-boot                             a guest that boots with the packages
//	make soak RUN=TestBoot                     its long form
//
// The clean root is one of Debian with apt alone (mmdebstrap), in the cache of
// the repository. Tests change a layer above it, in namespaces of their own
// without a network: nothing of the host is touched. They need root.
//
// The guest has systemd and the packages of such a root, and the kernel of package
// kernel. testdata/proof.sh runs in it after each boot.
package packages
