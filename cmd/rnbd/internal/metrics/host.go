package metrics

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
)

// wantLocalHost lets requests pass to h whose Host is an address or a name of this
// host. A page of a browser can have a name of its own resolve to a loopback
// address, and would then read what is served there (DNS rebinding): the browser
// sends that name.
func wantLocalHost(addr string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isLocalName(r.Host) {
			h.ServeHTTP(w, r)
			return
		}
		http.Error(w, fmt.Sprintf("this page is for this host alone, and %q is not one of its names: use http://%s%s", r.Host, addr, r.URL.Path),
			http.StatusMisdirectedRequest)
	})
}

// isLocalName reports whether the value of a Host field is an address, localhost, or
// the host's own name.
func isLocalName(field string) bool {
	name := field
	if host, _, err := net.SplitHostPort(field); err == nil {
		name = host
	}
	name = strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	own, err := os.Hostname()
	return name == "localhost" || strings.HasSuffix(name, ".localhost") || err == nil && own != "" && name == strings.ToLower(own)
}

// isLoopback reports whether only this host can reach a.
func isLoopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
