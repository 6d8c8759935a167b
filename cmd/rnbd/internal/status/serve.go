package status

import (
	"embed"
	"net/http"
)

//go:embed page
var files embed.FS

// policy allows a page nothing but its own files. Text cannot become script: the
// browser refuses to parse it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// Handler serves the page under /, its files beside it, and its values under
// /status.json.
func (p *Page) Handler() http.Handler {
	mux := http.NewServeMux()
	for path, file := range map[string]string{"GET /{$}": "status.html", "GET /status.css": "status.css", "GET /status.js": "status.js"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) { http.ServeFileFS(w, r, files, "page/"+file) })
	}
	mux.HandleFunc("GET /status.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(p.values()) // a reader that went away needs none
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("Cache-Control", "no-store")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		mux.ServeHTTP(w, r)
	})
}
